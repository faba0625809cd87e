// Where sessions live: the engines behind this server, the memory in use of each, and their sessions. A session that is
// found on another engine than before has moved, and that is told. A server with one engine of its own shows none of this.

import { element, find, plural, write } from "/web/draw.js";

const LOOK_MS = 2000;
const SHOWN_MAX = 24;
const TIERS = ["device", "host", "disk"];

export class Engines {
  constructor(server, tell) {
    this.server = server;
    this.tell = tell;
    this.homes = new Map();
    this.states = {};
    this.engines = [];
    this.looked = -Infinity;
    this.looking = false;
  }

  // A report of all engines; the list of sessions is asked for now and then, whatever view is shown.
  async hear(report) {
    const engines = report.engines ?? [];
    find("engines").hidden = engines.length === 0;
    if (engines.length === 0) return;
    this.engines = engines;
    this.draw();
    if (this.looking || performance.now() - this.looked < LOOK_MS) return;
    this.looking = true;
    await this.look().catch(() => {});
    this.looking = false;
    this.looked = performance.now();
    this.draw();
  }

  async look() {
    const [ready, listed] = await Promise.all([this.server.call("GET", "/health/ready"), this.server.call("GET", "/v1/sessions?limit=1000")]);
    this.states = (await ready.json()).engines ?? {};
    if (!listed.ok) return;
    const homes = new Map((await listed.json()).sessions.map(({ id, engine }) => [id, engine]));
    for (const { session, from, to } of moves(this.homes, homes)) this.tell(`${session} moved from ${from} to ${to}`);
    this.homes = homes;
  }

  draw() {
    if (find("health").hidden || this.engines.length === 0) return;
    const known = new Map(this.engines.map((each) => [each.engine, each.pools]));
    const names = [...new Set([...Object.keys(this.states), ...known.keys()])].sort();
    const cards = names.map((name) => this.card(name, known.get(name) ?? []));
    const text = cards.map((card) => card.textContent).join("\n");
    if (text === this.drawn) return;
    this.drawn = text;
    find("engine-cards").replaceChildren(...cards);
    write(find("engine-count"), `${plural(names.length, "engine")}, ${plural(this.homes.size, "session")}`);
  }

  card(name, pools) {
    const state = this.states[name] ?? "up";
    const living = [...this.homes].filter(([, home]) => home === name).map(([session]) => session);
    const chips = living.slice(0, SHOWN_MAX).map((session) => element("li", {}, session));
    if (living.length > SHOWN_MAX) chips.push(element("li", {}, `${living.length - SHOWN_MAX} more`));
    return element("section", { class: "card", "data-engine": name, "data-state": state, "aria-label": `Engine ${name}` },
      element("h3", {}, name, element("span", { class: "state" }, state)),
      ...shares(pools).map(([tier, share]) => element("label", {}, `${tier} ${Math.round(share)} %`,
        element("meter", { min: "0", max: "100", value: String(Math.round(share)) }))),
      element("p", {}, plural(living.length, "session")), element("ul", { class: "names" }, ...chips));
  }
}

// The share of each tier's units that is held.
export function shares(pools) {
  return TIERS.flatMap((tier) => {
    const own = pools.filter((pool) => pool.tier === tier);
    const units = own.reduce((sum, pool) => sum + pool.units, 0);
    const free = own.reduce((sum, pool) => sum + pool.holders.FREE, 0);
    return units > 0 ? [[tier, (100 * (units - free)) / units]] : [];
  });
}

// Sessions that are on another engine than before.
export function moves(before, now) {
  return [...now].flatMap(([session, to]) => {
    const from = before.get(session);
    return from !== undefined && from !== to ? [{ session, from, to }] : [];
  });
}
