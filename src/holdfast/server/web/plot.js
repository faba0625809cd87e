// A small plot over time: lines of one unit, the same seconds in every plot. Point at it for the values of a moment.

import { drawing, element, short, write } from "/web/draw.js";

const WIDTH = 300;
const HEIGHT = 80;
const SILENT_SECONDS = 5;

export class Plot {
  // `lines`: [name, class, label]. `ceiling`: a fixed top, or null for the largest value.
  constructor(title, unit, lines, { ceiling = null, say = short } = {}) {
    this.lines = lines;
    this.unit = unit;
    this.ceiling = ceiling;
    this.say = say;
    this.points = [];
    this.paths = lines.map(([, style]) => drawing("path", { class: `line ${style}` }));
    this.area = drawing("path", { class: `area ${lines[0][1]}` });
    this.cursor = drawing("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0.25, 0.5, 0.75].map((part) => drawing("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }));
    this.picture = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...grid, this.area, ...this.paths, this.cursor);
    this.top = element("span", { class: "top", title: "The top of the plot" });
    this.values = lines.map(([, style, label]) => {
      const value = element("b", {}, "–");
      return { value, whole: element("span", {}, element("i", { class: style }), label, " ", value) };
    });
    const key = element("p", { class: "key" }, ...this.values.map((each) => each.whole));
    const head = element("figcaption", {}, element("span", {}, title, element("span", { class: "quiet" }, ` ${unit}`)), this.top);
    this.whole = element("figure", { class: "plot" }, head, element("div", { class: "frame" }, this.picture), key);
    this.title = title;
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.leave());
  }

  // `points`: [{at, values: {name: number or null}}], oldest first; `seconds` before the last one are shown.
  show(points, seconds) {
    this.points = points;
    if (points.length === 0) return;
    const end = points.at(-1).at;
    const all = points.flatMap((point) => this.lines.map(([name]) => point.values[name] ?? 0));
    const top = this.ceiling ?? Math.max(1, nice(Math.max(...all)));
    this.place = (at) => WIDTH - ((end - at) / seconds) * WIDTH;
    const height = (value) => HEIGHT - Math.min(1, value / top) * (HEIGHT - 3) - 1.5;
    this.lines.forEach(([name], place) => {
      const path = track(points, name, this.place, height);
      this.paths[place].setAttribute("d", path);
      // What lies below a line is tinted where the line is one, and alone.
      const whole = this.lines.length === 1 && path.lastIndexOf("M") === 0;
      if (place === 0) this.area.setAttribute("d", whole ? `${path}L${this.place(end).toFixed(1)} ${HEIGHT}L${this.place(points[0].at).toFixed(1)} ${HEIGHT}Z` : "");
    });
    write(this.top, this.say(top));
    if (this.cursor.getAttribute("visibility") === "hidden") this.tell(points.at(-1));
    const said = this.lines.map(([name, , label]) => `${label} ${this.say(points.at(-1).values[name] ?? null)}`).join(", ");
    this.picture.setAttribute("aria-label", `${this.title}${this.unit && `, ${this.unit}`}: ${said}`);
  }

  tell(point) {
    this.lines.forEach(([name], place) => write(this.values[place].value, this.say(point.values[name] ?? null)));
  }

  point(event) {
    if (this.points.length === 0) return;
    const box = this.picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const near = this.points.reduce((best, point) => (Math.abs(this.place(point.at) - x) < Math.abs(this.place(best.at) - x) ? point : best));
    this.cursor.setAttribute("visibility", "visible");
    this.cursor.setAttribute("x1", this.place(near.at));
    this.cursor.setAttribute("x2", this.place(near.at));
    this.tell(near);
  }

  leave() {
    this.cursor.setAttribute("visibility", "hidden");
    if (this.points.length > 0) this.tell(this.points.at(-1));
  }
}

// A line through the points that have a value; a gap where one has none, and where none came for a while.
function track(points, name, place, height) {
  let path = "";
  let pen = "M";
  let before = -Infinity;
  for (const point of points) {
    const value = point.values[name];
    if (point.at - before > SILENT_SECONDS) pen = "M";
    before = point.at;
    if (value === null || value === undefined) {
      pen = "M";
      continue;
    }
    path += `${pen}${place(point.at).toFixed(1)} ${height(value).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

// The next round number.
export function nice(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}
