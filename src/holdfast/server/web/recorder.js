// The last five minutes of the memory: whole pictures every few seconds, and the differences between them as they
// came. Both the time and the bytes are bounded; an idle server costs nothing, because it sends nothing.

const SECONDS = 300;
const BYTES_MAX = 48 << 20;
const WHOLE_SECONDS = 5;
const HOLDER_BYTES = 120;

export class Recorder {
  constructor({ seconds = SECONDS, bytesMax = BYTES_MAX } = {}) {
    this.seconds = seconds;
    this.bytesMax = bytesMax;
    this.clear();
  }

  clear() {
    this.parts = [];
    this.bytes = 0;
    this.shown = null;
  }

  // A message that the model has taken: `kind` is "apply" or "name".
  note(kind, message, model, at) {
    const last = this.parts.at(-1);
    if (!last || at - last.at >= WHOLE_SECONDS) this.begin(model, at);
    else {
      const bytes = kind === "apply" ? message.byteLength : HOLDER_BYTES * (message.come.length + message.gone.length);
      last.changes.push({ at, kind, message });
      last.bytes += bytes;
      this.bytes += bytes;
    }
    while (this.parts.length > 1 && (at - this.parts[1].at > this.seconds || this.bytes > this.bytesMax)) {
      this.bytes -= this.parts.shift().bytes;
    }
  }

  begin(model, at) {
    const bytes = model.pools.reduce((sum, pool) => sum + pool.cells.byteLength, HOLDER_BYTES * model.holders.size);
    this.parts.push({ at, whole: model.copy(), changes: [], bytes });
    this.bytes += bytes;
  }

  get first() {
    return this.parts[0]?.at ?? null;
  }

  // The memory as it was at a moment; null before the first that is kept. A later moment of the same part goes on
  // from the last one that was asked for.
  at(moment) {
    const part = this.parts.findLast((each) => each.at <= moment) ?? this.parts[0];
    if (!part) return null;
    if (this.shown?.part !== part || this.shown.moment > moment) {
      this.shown = { part, moment: part.at, next: 0, model: part.whole.copy() };
    }
    const { shown } = this;
    while (shown.next < part.changes.length && part.changes[shown.next].at <= moment) {
      const { kind, message } = part.changes[shown.next++];
      shown.model[kind](message);
    }
    shown.moment = moment;
    return shown.model;
  }
}
