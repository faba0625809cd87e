// The panel beside a conversation: what its session holds, the memory in small, the rate, and what happens.

import { colours, element, find, short } from "/web/draw.js";
import { History } from "/web/history.js";
import { KINDS } from "/web/holders.js";
import { Plot } from "/web/plot.js";

const COLUMNS_MAX = 96;
const COLUMNS_MIN = 32;
const ROWS_MAX = 40;
const DRAW_MS = 250;

export class Glance {
  constructor(forest, model) {
    this.forest = forest;
    this.model = model;
    this.panel = find("glance");
    this.canvas = find("glance-map");
    this.rates = new History(60);
    this.plot = new Plot("Throughput", "tokens a second", [["said", "c1", "said"]]);
    this.sessions = new Map();
    this.waiting = null;
    find("glance-rate").append(this.plot.whole);
    find("glance-rate").parentNode.hidden = true;
    for (const name of ["changed", "chosen"]) forest.addEventListener(name, () => this.drawSoon());
  }

  get seen() {
    return this.panel.offsetParent !== null;
  }

  hearHealth({ rates }) {
    find("glance-rate").parentNode.hidden = false;
    this.rates.add({ said: rates.generated_tokens ?? 0 });
    if (this.seen) this.plot.show(this.rates.points, 60);
  }

  hearCensus({ sessions }) {
    this.sessions = sessions;
    this.drawSoon();
  }

  drawSoon() {
    if (!this.seen) return;
    this.waiting ??= setTimeout(() => {
      this.waiting = null;
      this.draw();
    }, DRAW_MS);
  }

  draw() {
    if (!this.seen) return;
    this.drawSession(this.forest.current);
    this.drawMap();
  }

  drawSession(branch) {
    const last = branch.history.at(-1);
    const usage = last?.usage;
    const held = this.sessions.get(branch.id) ?? { device: 0, host: 0, disk: 0 };
    const tiers = Object.entries(held).filter(([, units]) => units > 0).map(([tier, units]) => `${units} on ${tier}`);
    const rows = [
      ["Turns", String(branch.history.length)],
      ["Tokens", usage ? short(usage.prompt_tokens + usage.completion_tokens) : "0"],
      ["Units of its own", tiers.join(", ") || "none"],
      ["Of the last prompt, in memory", usage ? `${Math.round((100 * usage.cached_tokens) / Math.max(1, usage.prompt_tokens))} %` : "–"],
    ];
    const list = element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    find("glance-session").replaceChildren(element("h2", {}, "This session"), list);
  }

  // A large pool is shown by some of its units, evenly.
  drawMap() {
    const pool = this.model.pools.find((each) => each.tier === "device" && each.units > 0);
    if (!pool) return;
    const cells = Math.min(pool.units, COLUMNS_MAX * ROWS_MAX);
    const columns = Math.min(COLUMNS_MAX, Math.max(COLUMNS_MIN, Math.ceil(Math.sqrt(cells * 3))));
    const rows = Math.ceil(cells / columns);
    if (this.canvas.width !== columns || this.canvas.height !== rows) Object.assign(this.canvas, { width: columns, height: rows });
    const paint = colours(KINDS);
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    let held = 0;
    for (let cell = 0; cell < cells; cell++) {
      pixels[cell] = paint[this.model.kindOf(pool.cells[Math.floor((cell * pool.units) / cells)])];
    }
    for (let unit = 0; unit < pool.units; unit++) if (pool.cells[unit]) held++;
    context.putImageData(image, 0, 0);
    find("glance-held").textContent = `${short(held)} of ${short(pool.units)} units held`;
  }
}
