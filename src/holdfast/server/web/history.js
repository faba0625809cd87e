// The figures of the last five minutes, as the page heard them: one point a second, and no more than that many.

const SECONDS = 300;

export class History {
  constructor(seconds = SECONDS) {
    this.seconds = seconds;
    this.points = [];
  }

  // The seconds that plots show: a page that was just opened does not show five empty minutes.
  get span() {
    const known = this.points.length > 1 ? this.points.at(-1).at - this.points[0].at : 0;
    return Math.min(this.seconds, Math.max(60, known));
  }

  add(values, at = performance.now() / 1000) {
    this.points.push({ at, values });
    while (this.points.length > this.seconds || at - this.points[0].at > this.seconds) this.points.shift();
  }
}
