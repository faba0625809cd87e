// What is being typed, told to the session while it is typed: the server computes it before it is sent. What was
// typed and not sent belongs to the connection, and is gone with it.

const PAUSE_MS = 120;

export class Draft {
  constructor(link) {
    this.link = link;
    this.told = "";
    this.text = "";
    this.timer = null;
  }

  // What is in the box now. It is told after a short pause, so that a fast typist costs few messages.
  type(text) {
    this.text = text;
    this.timer ??= setTimeout(() => this.tell(), PAUSE_MS);
  }

  tell() {
    clearTimeout(this.timer);
    this.timer = null;
    this.become(this.text);
  }

  // The input of the next turn becomes this text: only what differs is sent.
  become(text) {
    if (text === this.told) return;
    const start = common(this.told, text);
    // The server counts characters; JavaScript counts some of them twice.
    const characters = [...this.told.slice(0, start)].length;
    if (this.link.say({ type: "input.replace", start: characters, text: text.slice(start) })) this.told = text;
  }

  // The turn was committed, or the connection is new: the server knows nothing of the next input.
  clear() {
    clearTimeout(this.timer);
    this.timer = null;
    this.told = this.text = "";
  }
}

function common(one, other) {
  let place = 0;
  while (place < one.length && one[place] === other[place]) place++;
  // Halves of a character are not told apart.
  if (place > 0 && /[\ud800-\udbff]/.test(one[place - 1])) place--;
  return place;
}
