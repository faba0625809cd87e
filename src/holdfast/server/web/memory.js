// The map: every unit of every pool as one cell, coloured by who holds it. Differences come as runs of numbers.

import { bytes, element, onceAFrame } from "/web/draw.js";

const KINDS = ["free", "tree", "turn", "session", "checkpoint", "retiring", "transit", "quarantine"];
const SAYS = {
  free: "free", tree: "shared prefixes", turn: "turns in flight", session: "sessions", checkpoint: "checkpoints",
  retiring: "being freed", transit: "on the move", quarantine: "quarantined",
};
const CELL_SIZES = [14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1];
const POOL_HEIGHT = 260;

export class MemoryView {
  constructor(live) {
    this.live = live;
    this.panel = document.getElementById("memory");
    this.pools = [];
    this.holders = new Map();
    this.report = null;
    this.chosen = null;
    this.leased = {};
    this.paint = [];
    this.draw = onceAFrame(() => this.redraw());
    new ResizeObserver(() => this.layOut()).observe(document.getElementById("pools"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    this.drawLegend();
  }

  hear(message) {
    if (message instanceof ArrayBuffer) this.apply(new Uint32Array(message));
    else if (message.type === "memory.pools") this.begin(message.pools);
    else if (message.type === "memory.holders") this.name(message);
    else if (message.type === "memory.report") this.report = message;
    else if (message.type === "memory.leased" && message.session === this.chosen) this.leased = message.units;
    this.draw();
  }

  begin(pools) {
    const place = document.getElementById("pools");
    this.holders.clear();
    if (this.chosen !== null) this.live.say({ type: "look", session: this.chosen });
    this.pools = pools.map((pool, index) => {
      const title = element("h2", {});
      const canvas = element("canvas", { tabindex: "0", role: "img" });
      const made = { ...pool, title, canvas, cells: new Uint16Array(pool.units), at: 0 };
      canvas.addEventListener("pointermove", (event) => this.point(made, this.unitAt(made, event)));
      canvas.addEventListener("click", (event) => this.choose(this.sessionOf(made.cells[this.unitAt(made, event)])));
      canvas.addEventListener("keydown", (event) => this.move(made, event));
      made.box = element("div", { class: "pool", "data-tier": pool.tier, id: `pool-${index}` }, title, canvas);
      return made;
    });
    place.replaceChildren(...this.pools.filter((pool) => pool.units).map((pool) => pool.box));
    this.recolour();
    this.layOut();
  }

  name({ come, gone }) {
    for (const number of gone) this.holders.delete(number);
    for (const [number, kind, session, turn] of come) this.holders.set(number, { kind, session, turn });
    this.recolour();
  }

  apply(numbers) {
    this.step = numbers[0];
    for (let place = 1; place < numbers.length; ) {
      const pool = this.pools[numbers[place]];
      const end = place + 2 + numbers[place + 1] * 3;
      for (place += 2; place < end; place += 3) {
        pool.cells.fill(numbers[place + 2], numbers[place], numbers[place] + numbers[place + 1]);
      }
    }
  }

  kindOf(number) {
    return number < KINDS.length ? number : (this.holders.get(number)?.kind ?? 0);
  }

  sessionOf(number) {
    return this.holders.get(number)?.session || null;
  }

  choose(session) {
    this.chosen = session === this.chosen ? null : session;
    this.leased = {};
    this.live.say({ type: "look", session: this.chosen });
    this.recolour();
    this.draw();
  }

  // --- drawing --------------------------------------------------------------------------------------

  recolour() {
    const style = getComputedStyle(document.documentElement);
    const full = KINDS.map((kind) => pixel(style.getPropertyValue(`--${kind}`), 255));
    const dim = KINDS.map((kind) => pixel(style.getPropertyValue(`--${kind}`), 55));
    const highest = Math.max(KINDS.length - 1, ...this.holders.keys());
    this.shared = full[KINDS.indexOf("tree")];
    this.paint = new Uint32Array(highest + 1);
    for (let number = 0; number <= highest; number++) {
      const lit = this.chosen === null || this.sessionOf(number) === this.chosen;
      this.paint[number] = (lit ? full : dim)[this.kindOf(number)];
    }
  }

  layOut() {
    const width = document.getElementById("pools").clientWidth - 4;
    if (width <= 0) return;
    for (const pool of this.pools) {
      const fits = (size) => Math.ceil(pool.units / Math.floor(width / size)) * size <= POOL_HEIGHT;
      pool.size = CELL_SIZES.find(fits) ?? 1;
      pool.columns = Math.max(1, Math.min(pool.units, Math.floor(width / pool.size)));
      pool.rows = Math.ceil(pool.units / pool.columns);
      pool.canvas.width = pool.columns;
      pool.canvas.height = pool.rows;
      pool.canvas.style.width = `${pool.columns * pool.size}px`;
      pool.context = pool.canvas.getContext("2d");
      pool.image = pool.rows ? pool.context.createImageData(pool.columns, pool.rows) : null;
    }
    this.draw();
  }

  redraw() {
    if (this.panel.hidden) return;
    const totals = KINDS.map(() => 0);
    const held = new Map();
    for (const [place, pool] of this.pools.entries()) {
      if (!pool.image) continue;
      const pixels = new Uint32Array(pool.image.data.buffer);
      const counts = new Uint32Array(this.paint.length);
      for (let unit = 0; unit < pool.units; unit++) {
        const number = pool.cells[unit];
        pixels[unit] = this.paint[number];
        counts[number]++;
      }
      // What a chosen session shares with others is lit as well.
      for (const unit of this.leased[place] ?? []) pixels[unit] = this.shared;
      pool.context.putImageData(pool.image, 0, 0);
      counts.forEach((count, number) => {
        if (!count) return;
        totals[this.kindOf(number)] += count;
        const session = this.sessionOf(number);
        if (session) held.set(session, (held.get(session) ?? 0) + count);
      });
      this.entitle(pool, pool.units - counts[0]);
    }
    KINDS.forEach((kind, place) => (this.counts[place].textContent = ` ${totals[place]}`));
    this.drawHolders(held);
  }

  entitle(pool, used) {
    const known = this.report?.pools.find((each) => each.component === pool.component && each.tier === pool.tier);
    const size = known ? `, ${bytes(used * known.bytes_per_unit)} of ${bytes(pool.units * known.bytes_per_unit)}` : "";
    const label = `${pool.component} on ${pool.tier}: ${used} of ${pool.units} held${size}`;
    if (pool.title.textContent !== label) {
      pool.title.textContent = label;
      pool.canvas.setAttribute("aria-label", `Map of ${label}`);
    }
  }

  drawLegend() {
    this.counts = KINDS.map(() => element("b", {}, " 0"));
    const items = KINDS.map((kind, place) => {
      const swatch = element("i", {});
      swatch.style.background = `var(--${kind})`;
      return element("li", { "data-kind": kind }, swatch, SAYS[kind], this.counts[place]);
    });
    document.getElementById("legend").replaceChildren(...items);
  }

  drawHolders(held) {
    const place = document.getElementById("holders");
    const largest = [...held].sort((one, other) => other[1] - one[1] || (one[0] < other[0] ? -1 : 1)).slice(0, 40);
    document.getElementById("no-holders").hidden = largest.length > 0;
    if (this.chosen !== null && !largest.some(([session]) => session === this.chosen)) largest.push([this.chosen, 0]);
    const listening = new Map((this.report?.listening ?? []).map((each) => [each.session, each]));
    const known = new Map([...place.children].map((button) => [button.dataset.session, button]));
    const buttons = largest.map(([session, units]) => {
      const button = known.get(session) ?? element("button", { "data-session": session, onclick: () => this.choose(session) });
      const heard = listening.get(session);
      button.textContent = `${session} · ${units}` + (heard ? ` · ${heardTokens(heard)}` : "");
      button.dataset.state = heard ? "listening" : "";
      button.setAttribute("aria-pressed", session === this.chosen ? "true" : "false");
      return button;
    });
    const focused = document.activeElement;
    place.replaceChildren(...buttons);
    if (buttons.includes(focused)) focused.focus();
  }

  // --- pointing -------------------------------------------------------------------------------------

  unitAt(pool, event) {
    const box = pool.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * pool.columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * pool.rows);
    return Math.min(pool.units - 1, Math.max(0, row * pool.columns + column));
  }

  move(pool, event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -pool.columns, ArrowDown: pool.columns };
    if (event.key in steps) {
      pool.at = Math.min(pool.units - 1, Math.max(0, pool.at + steps[event.key]));
      this.point(pool, pool.at);
      event.preventDefault();
    } else if (event.key === "Enter") this.choose(this.sessionOf(pool.cells[pool.at]));
  }

  point(pool, unit) {
    const number = pool.cells[unit];
    const kind = KINDS[this.kindOf(number)];
    const holder = this.holders.get(number);
    let who = holder ? `${kind} ${holder.session || "of somebody else"}` : SAYS[kind];
    if (holder?.turn) who = `turn ${holder.turn} of ${holder.session}`;
    document.getElementById("pointed").textContent = `${pool.component} on ${pool.tier}, unit ${unit}: ${who}`;
  }
}

// What a session that listens has heard of its next turn.
export function heardTokens({ heard, ahead }) {
  return `listening: ${heard} tokens heard, ${ahead} computed`;
}

// A colour as canvases store it.
function pixel(colour, alpha) {
  const value = parseInt(colour.trim().slice(1), 16);
  return ((alpha << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
