// The time axis below the map: five minutes in colours, a slider over them, and a button that plays them again.

import { colours, find, write } from "/web/draw.js";
import { KINDS } from "/web/holders.js";

const SECONDS = 300;
const HEIGHT = 40;
const FRAME_MS = 100;
const SPEED = 4;

export class Scrubber {
  constructor(recorder, model, view) {
    this.recorder = recorder;
    this.model = model;
    this.view = view;
    this.slider = find("when");
    this.strip = find("past");
    this.seconds = [];
    this.moment = null;
    this.playing = null;
    this.strip.height = HEIGHT;
    this.slider.addEventListener("input", () => this.go(this.now + Number(this.slider.value)));
    find("live").addEventListener("click", () => this.goLive());
    find("play").addEventListener("click", () => (this.playing ? this.pause() : this.play()));
  }

  get now() {
    return performance.now() / 1000;
  }

  // Once a second: the units of each kind on each tier, for the axis.
  note(tiers) {
    const at = this.now;
    this.seconds.push({ at, tiers: [...tiers.values()] });
    while (this.seconds.length > SECONDS || at - this.seconds[0].at > SECONDS) this.seconds.shift();
    if (find("memory").hidden) return;
    this.drawStrip();
    if (this.moment !== null) this.drawMoment();
  }

  clear() {
    this.seconds = [];
    this.goLive();
  }

  go(moment) {
    if (moment >= this.now - 0.5) return this.goLive();
    this.moment = Math.max(moment, this.recorder.first ?? moment);
    const model = this.recorder.at(this.moment);
    if (model) this.view.show(model);
    this.drawMoment();
  }

  goLive() {
    this.pause();
    this.moment = null;
    this.view.show(this.model);
    this.drawMoment();
  }

  play() {
    if (this.moment === null) this.go(Math.max(this.recorder.first ?? this.now, this.now - SECONDS));
    let before = performance.now();
    this.playing = setInterval(() => {
      const now = performance.now();
      const step = ((now - before) / 1000) * SPEED;
      before = now;
      if (this.moment === null) this.pause();
      else this.go(this.moment + step);
    }, FRAME_MS);
    write(find("play"), "❚❚");
    find("play").setAttribute("aria-label", "Pause");
  }

  pause() {
    clearInterval(this.playing);
    this.playing = null;
    write(find("play"), "▶");
    find("play").setAttribute("aria-label", "Play from here");
  }

  drawMoment() {
    const before = this.moment === null ? 0 : Math.min(0, this.moment - this.now);
    this.slider.value = String(before);
    find("live").setAttribute("aria-pressed", this.moment === null ? "true" : "false");
    const said = this.moment === null ? "now" : `${Math.round(-before)} s ago`;
    write(find("when-shown"), said);
    this.slider.setAttribute("aria-valuetext", said);
  }

  drawStrip() {
    const context = this.strip.getContext("2d");
    const image = context.createImageData(SECONDS, HEIGHT);
    const pixels = new Uint32Array(image.data.buffer);
    const paint = colours(KINDS);
    const now = this.now;
    let right = SECONDS - 1;
    // From the newest to the oldest: each reaches to the next one.
    for (const { at, tiers } of this.seconds.toReversed()) {
      const column = SECONDS - 1 - Math.round(now - at);
      if (column < 0) break;
      // A band for each tier, the device's at the bottom.
      const band = Math.floor(HEIGHT / tiers.length);
      tiers.forEach((kinds, tier) => {
        for (const [kind, row] of stacked(kinds, HEIGHT - tier * band, band - (tiers.length > 1 ? 2 : 0))) {
          pixels.fill(paint[kind], row * SECONDS + column, row * SECONDS + right + 1);
        }
      });
      right = Math.max(0, column - 1);
    }
    context.putImageData(image, 0, 0);
  }
}

// The rows of one moment, with the kind of each: what is held grows from below, and at least a line of it is seen.
function* stacked(kinds, bottom, height) {
  const all = kinds.reduce((sum, each) => sum + each, 0) || 1;
  let row = bottom;
  for (let kind = 1; kind < KINDS.length; kind++) {
    const rows = kinds[kind] ? Math.max(1, Math.round((kinds[kind] / all) * height)) : 0;
    for (let each = 0; each < rows && row > bottom - height; each++) yield [kind, --row];
  }
}
