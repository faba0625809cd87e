// Markdown inside a line: emphasis, code, links. Links go to web pages and mail only. What is not Markdown, HTML
// included, is text. Hostile input costs at most a little more than its length: searches remember what they found.

import { node } from "/web/patch.js";

const DEEPEST = 6;
const LABEL_MAX = 1000;
const ADDRESS = /^(?:https?:\/\/|mailto:)[^\s<>"\\^`{|}]+$/i;
const BARE = /https?:\/\/[^\s<>"\\^`{|}\]]+/iy;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[!<h]/g;
const ESCAPED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

export function inline(text, depth = 0) {
  return new Line(text, depth).read();
}

// The description of a link, or null where its address is not one that the page links to.
export function link(address, children) {
  if (!ADDRESS.test(address)) return null;
  return node("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, children);
}

class Line {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.found = new Map();
  }

  read() {
    const parts = [];
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(text);
      const stop = next ? next.index : text.length;
      if (stop > this.at) parts.push(text.slice(this.at, stop));
      this.at = stop;
      if (next) parts.push(this.special());
    }
    return parts;
  }

  // The next place of a string, searched for once and remembered until it is passed.
  next(what, from) {
    let place = this.found.get(what);
    if (place === undefined || (place !== -1 && place < from)) {
      place = this.text.indexOf(what, from);
      this.found.set(what, place);
    }
    return place;
  }

  special() {
    const { text, at } = this;
    const letter = text[at];
    const made =
      letter === "\\" ? this.escape()
      : letter === "`" ? this.code()
      : letter === "[" || (letter === "!" && text[at + 1] === "[") ? this.labelled()
      : letter === "<" ? this.angled()
      : letter === "h" ? this.bare()
      : letter === "!" ? null
      : this.emphasis();
    if (made !== null) return made;
    this.at = at + 1;
    return letter;
  }

  escape() {
    const following = this.text[this.at + 1];
    if (following === "\n") {
      this.at += 2;
      return node("br");
    }
    if (!following || !ESCAPED.test(following)) return null;
    this.at += 2;
    return following;
  }

  code() {
    const { text, at } = this;
    let end = at;
    while (text[end] === "`") end++;
    const fence = text.slice(at, end);
    let close = this.next(fence, end);
    while (close !== -1 && (text[close + fence.length] === "`" || text[close - 1] === "`")) {
      let past = close;
      while (text[past] === "`") past++;
      close = this.next(fence, past);
    }
    if (close === -1) {
      this.at = end;
      return fence;
    }
    this.at = close + fence.length;
    const inside = text.slice(end, close).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    return node("code", {}, padded ? inside.slice(1, -1) : inside);
  }

  // [text](address), and images, which are shown as links: nothing is loaded from elsewhere.
  labelled() {
    const { text } = this;
    const start = this.at + (text[this.at] === "!" ? 2 : 1);
    const middle = this.next("](", start);
    if (middle === -1 || middle - start > LABEL_MAX) return null;
    const end = this.next(")", middle);
    if (end === -1 || end - middle > 2 * LABEL_MAX) return null;
    const label = text.slice(start, middle);
    if (this.depth >= DEEPEST || label.includes("](")) return null;
    const address = text.slice(middle + 2, end).trim().replace(/\s+"[^"]*"$/, "");
    const made = link(address, inline(label || address, this.depth + 1));
    if (made) this.at = end + 1;
    return made;
  }

  angled() {
    const end = this.next(">", this.at);
    if (end === -1 || end - this.at > LABEL_MAX) return null;
    const address = this.text.slice(this.at + 1, end);
    const made = link(address, [address]);
    if (made) this.at = end + 1;
    return made;
  }

  bare() {
    if (this.at > 0 && WORD.test(this.text[this.at - 1])) return null;
    BARE.lastIndex = this.at;
    const match = BARE.exec(this.text);
    if (!match) return null;
    const address = match[0].replace(/[.,;:!?'*_~)]+$/, "");
    const made = link(address, [address]);
    if (made) this.at += address.length;
    return made;
  }

  emphasis() {
    const { text, at } = this;
    const [mark, tag] = MARKS.find(([each]) => text.startsWith(each, at)) ?? [];
    if (!mark || this.depth >= DEEPEST) return null;
    const from = at + mark.length;
    if (!text[from] || /\s/.test(text[from])) return null;
    if (mark[0] === "_" && at > 0 && WORD.test(text[at - 1])) return null;
    const end = this.closing(mark, from);
    if (end === -1) return null;
    this.at = end + mark.length;
    return node(tag, {}, inline(text.slice(from, end), this.depth + 1));
  }

  // Where a mark ends what it began: behind a letter, and not as a part of a longer mark.
  closing(mark, from) {
    const { text } = this;
    for (let tries = 0, place = from; tries < 40; tries++) {
      place = this.next(mark, place);
      if (place === -1) return -1;
      let past = place;
      while (text[past] === mark[0]) past++;
      const run = past - place;
      const ends = mark.length === 1 ? run === 1 || run === 3 : run >= 2;
      const inWord = mark[0] === "_" && text[past] && WORD.test(text[past]);
      if (place > from && ends && !inWord && !/\s/.test(text[place - 1])) return run === 3 ? past - mark.length : place;
      place = past;
    }
    return -1;
  }
}
