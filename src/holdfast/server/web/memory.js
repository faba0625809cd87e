// The map: every unit of every pool as one cell, in the colour of who holds it; now, or at a moment before.

import { atMostEvery, bytes, colours, element, find, onceAFrame, write } from "/web/draw.js";
import { KINDS, SAYS, heardTokens, tenantOf } from "/web/holders.js";

const CELL_SIZES = [28, 22, 18, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1];
const POOL_HEIGHT = 260;
const CHIPS_MAX = 24;
const WORDS_MS = 300;
const SORTED_MS = 250;

export class MemoryView {
  // `tell(session)` asks the server for what a session shares.
  constructor(model, tell) {
    this.live = model;
    this.model = model;
    this.tell = tell;
    this.panel = find("memory");
    this.maps = [];
    this.report = null;
    this.by = "place";
    this.chosen = null;
    this.leased = {};
    const frame = onceAFrame(() => this.redraw());
    const slowly = atMostEvery(SORTED_MS, frame);
    // Where units are sorted, every change moves all of them: that is shown less often, but for what a person asks.
    this.draw = () => (this.by === "place" ? frame() : slowly());
    this.drawNow = frame;
    // The map follows every change; the words around it are read, and come more slowly.
    this.tellSoon = atMostEvery(WORDS_MS, () => this.drawWords());
    new ResizeObserver(() => this.layOut()).observe(find("pools"));
    find("arrange").addEventListener("change", (event) => this.arrange(event.target.value));
    this.drawLegend();
  }

  // A map for each pool that has units.
  begin() {
    this.maps = this.live.pools.map((pool, index) => {
      const title = element("h2", {});
      const canvas = element("canvas", { tabindex: "0", role: "img" });
      const map = { index, title, canvas, at: 0, order: null };
      canvas.addEventListener("pointermove", (event) => this.point(map, this.cellAt(map, event)));
      canvas.addEventListener("click", (event) => this.chooseAt(map, this.cellAt(map, event)));
      canvas.addEventListener("keydown", (event) => this.move(map, event));
      map.box = element("div", { class: "pool", "data-tier": pool.tier, id: `pool-${index}` }, title, canvas);
      return map;
    });
    find("pools").replaceChildren(...this.maps.filter((map) => this.live.pools[map.index].units).map((map) => map.box));
    if (this.session) this.tell(this.session);
    this.layOut();
  }

  // The memory now, or as it was.
  show(model) {
    this.model = model;
    this.draw();
  }

  arrange(by) {
    this.by = by;
    this.drawNow();
  }

  get session() {
    return this.chosen?.by === "session" ? this.chosen.name : null;
  }

  choose(by, name) {
    const same = this.chosen?.by === by && this.chosen.name === name;
    this.chosen = same || name === null ? null : { by, name };
    this.leased = {};
    this.tell(this.session);
    this.drawNow();
  }

  hearLeased(message) {
    if (message.session !== this.session) return;
    this.leased = message.units;
    this.draw();
  }

  // --- drawing --------------------------------------------------------------------------------------

  layOut() {
    const width = find("pools").clientWidth - 4;
    if (width <= 0) return;
    for (const map of this.maps) {
      const { units } = this.live.pools[map.index];
      const fits = (size) => Math.ceil(units / Math.floor(width / size)) * size <= POOL_HEIGHT;
      map.size = CELL_SIZES.find(fits) ?? 1;
      map.columns = Math.max(1, Math.min(units, Math.floor(width / map.size)));
      map.rows = Math.ceil(units / map.columns);
      map.canvas.width = map.columns;
      map.canvas.height = map.rows;
      map.canvas.style.width = `${map.columns * map.size}px`;
      map.context = map.canvas.getContext("2d");
      map.image = map.rows ? map.context.createImageData(map.columns, map.rows) : null;
    }
    this.draw();
  }

  // The group of a holder, by what units are arranged or chosen by.
  group(number, by) {
    const session = this.model.sessionOf(number);
    if (by === "kind") return KINDS[this.model.kindOf(number)];
    if (by === "session") return session;
    return session ? tenantOf(session) : null;
  }

  // A colour for each holder's number: those that are not chosen are dim.
  paints(highest) {
    const full = colours(KINDS);
    const dim = colours(KINDS, 55);
    const paint = new Uint32Array(highest + 1);
    for (let number = 0; number <= highest; number++) {
      const lit = this.chosen === null || this.group(number, this.chosen.by) === this.chosen.name;
      paint[number] = (lit ? full : dim)[this.model.kindOf(number)];
    }
    this.shared = full[KINDS.indexOf("tree")];
    return paint;
  }

  redraw() {
    if (this.panel.hidden || this.maps.length === 0) return;
    const { highest } = this.model;
    const paint = this.paints(highest);
    const ranks = this.by === "place" ? null : this.ranks(highest);
    for (const map of this.maps) {
      const pool = this.model.pools[map.index];
      if (!map.image || !pool) continue;
      map.order = ranks ? ordered(pool.cells, this.model.count(pool), ranks) : null;
      this.paint(map, pool.cells, paint);
    }
    this.tellSoon();
  }

  // Titles, the legend and the largest holders.
  drawWords() {
    const { highest } = this.model;
    const totals = KINDS.map(() => 0);
    const held = new Map();
    for (const map of this.maps) {
      const pool = this.model.pools[map.index];
      if (!map.image || !pool) continue;
      const counts = this.model.count(pool);
      for (let number = 0; number <= highest; number++) {
        if (!counts[number]) continue;
        totals[this.model.kindOf(number)] += counts[number];
        const name = this.group(number, this.by === "tenant" ? "tenant" : "session");
        if (name) held.set(name, (held.get(name) ?? 0) + counts[number]);
      }
      this.entitle(map, pool, pool.units - counts[0]);
    }
    KINDS.forEach((kind, place) => {
      write(this.counts[place], ` ${totals[place]}`);
      this.counts[place].parentNode.setAttribute("aria-pressed", this.chosen?.by === "kind" && this.chosen.name === kind ? "true" : "false");
    });
    this.drawHolders(held);
  }

  paint(map, cells, paint) {
    const pixels = new Uint32Array(map.image.data.buffer);
    const { order } = map;
    if (order) for (let cell = 0; cell < order.length; cell++) pixels[cell] = paint[cells[order[cell]]];
    else for (let unit = 0; unit < cells.length; unit++) pixels[unit] = paint[cells[unit]];
    // What a chosen session shares with others is lit as well, where the map shows the present.
    if (this.model === this.live) {
      const places = order && this.leased[map.index]?.length ? inverse(order) : null;
      for (const unit of this.leased[map.index] ?? []) pixels[places ? places[unit] : unit] = this.shared;
    }
    map.context.putImageData(map.image, 0, 0);
  }

  // The place of each holder's number in the arrangement: groups by name, what is free behind them.
  ranks(highest) {
    const numbers = Array.from({ length: highest + 1 }, (_, number) => number);
    const key = (number) => `${number === 0 ? 2 : this.group(number, this.by) === null ? 1 : 0}${this.group(number, this.by) ?? ""}`;
    const keys = numbers.map((number) => `${key(number)} ${this.model.kindOf(number)}`);
    numbers.sort((one, other) => (keys[one] < keys[other] ? -1 : keys[one] > keys[other] ? 1 : one - other));
    return numbers;
  }

  entitle(map, pool, used) {
    const known = this.report?.pools.find((each) => each.component === pool.component && each.tier === pool.tier);
    const size = known ? `, ${bytes(used * known.bytes_per_unit)} of ${bytes(pool.units * known.bytes_per_unit)}` : "";
    const label = `${pool.component} on ${pool.tier}: ${used} of ${pool.units} held${size}`;
    if (map.title.textContent === label) return;
    map.title.textContent = label;
    map.canvas.setAttribute("aria-label", `Map of ${label}`);
  }

  drawLegend() {
    this.counts = KINDS.map(() => element("b", {}, " 0"));
    const items = KINDS.map((kind, place) => {
      const swatch = element("i", {});
      swatch.style.background = `var(--${kind})`;
      const light = element("button", { type: "button", "aria-pressed": "false", onclick: () => this.choose("kind", kind) }, swatch, SAYS[kind], this.counts[place]);
      return element("li", { "data-kind": kind }, light);
    });
    find("legend").replaceChildren(...items);
  }

  drawHolders(held) {
    const place = find("holders");
    const by = this.by === "tenant" ? "tenant" : "session";
    write(find("holders-title"), by === "tenant" ? "Tenants with memory" : "Sessions with memory");
    const largest = [...held].sort((one, other) => other[1] - one[1] || (one[0] < other[0] ? -1 : 1)).slice(0, CHIPS_MAX);
    find("no-holders").hidden = largest.length > 0;
    if (this.chosen?.by === by && !largest.some(([name]) => name === this.chosen.name)) largest.push([this.chosen.name, 0]);
    const listening = new Map((this.report?.listening ?? []).map((each) => [each.session, each]));
    const known = new Map([...place.children].map((button) => [`${button.dataset.by} ${button.dataset.session}`, button]));
    const buttons = largest.map(([name, units]) => {
      const button = known.get(`${by} ${name}`) ?? element("button", { type: "button", "data-by": by, "data-session": name, onclick: () => this.choose(by, name) });
      const heard = by === "session" ? listening.get(name) : null;
      write(button, `${name} · ${units}` + (heard ? ` · ${heardTokens(heard)}` : ""));
      button.dataset.state = heard ? "listening" : "";
      button.setAttribute("aria-pressed", this.chosen?.by === by && this.chosen.name === name ? "true" : "false");
      return button;
    });
    if (buttons.length === place.children.length && buttons.every((button, at) => place.children[at] === button)) return;
    const focused = document.activeElement;
    place.replaceChildren(...buttons);
    if (buttons.includes(focused)) focused.focus();
  }

  // --- pointing -------------------------------------------------------------------------------------

  cellAt(map, event) {
    const box = map.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * map.columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * map.rows);
    return Math.min(this.live.pools[map.index].units - 1, Math.max(0, row * map.columns + column));
  }

  unit(map, cell) {
    return map.order ? map.order[cell] : cell;
  }

  chooseAt(map, cell) {
    this.choose("session", this.model.sessionOf(this.model.pools[map.index].cells[this.unit(map, cell)]));
  }

  move(map, event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map.columns, ArrowDown: map.columns };
    if (event.key in steps) {
      map.at = Math.min(this.live.pools[map.index].units - 1, Math.max(0, map.at + steps[event.key]));
      this.point(map, map.at);
      event.preventDefault();
    } else if (event.key === "Enter") this.chooseAt(map, map.at);
  }

  point(map, cell) {
    const pool = this.model.pools[map.index];
    const unit = this.unit(map, cell);
    const number = pool.cells[unit];
    const kind = KINDS[this.model.kindOf(number)];
    const holder = this.model.holders.get(number);
    let who = holder ? `${kind} ${holder.session || "of somebody else"}` : SAYS[kind];
    if (holder?.turn) who = `turn ${holder.turn} of ${holder.session}`;
    write(find("pointed"), `${pool.component} on ${pool.tier}, unit ${unit}: ${who}`);
  }
}

// The units in the order of their holders' ranks, by counting.
function ordered(cells, counts, ranks) {
  const starts = new Uint32Array(counts.length);
  let start = 0;
  for (const number of ranks) {
    starts[number] = start;
    start += counts[number];
  }
  const order = new Uint32Array(cells.length);
  for (let unit = 0; unit < cells.length; unit++) order[starts[cells[unit]]++] = unit;
  return order;
}

function inverse(order) {
  const places = new Uint32Array(order.length);
  for (let cell = 0; cell < order.length; cell++) places[order[cell]] = cell;
  return places;
}
