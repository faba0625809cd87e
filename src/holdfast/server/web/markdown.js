// Markdown in blocks, as a model writes it: headings, lists, quotes, tables, code. It becomes descriptions of nodes
// for `patch`, never markup. A view of a text that grows reads only the block that is still open again.

import { highlight } from "/web/highlight.js";
import { inline } from "/web/inline.js";
import { node, patch } from "/web/patch.js";

const DEEPEST = 5;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

// The blocks of a text, each with the place behind it in the text.
export function blocks(text, depth = 0) {
  const reader = new Reader(text, depth);
  const found = [];
  while (!reader.ended) {
    const block = reader.block();
    if (block) found.push({ block, end: reader.place });
  }
  return found;
}

// An answer that grows in a node of the page.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.settled = 0;
    this.blocks = 0;
  }

  show(text) {
    if (text === this.text) return;
    // A block that another one follows does not change any more.
    if (!text.startsWith(this.text.slice(0, this.settled))) this.settled = this.blocks = 0;
    this.text = text;
    const found = blocks(text.slice(this.settled));
    patch(this.root, found.map((each) => each.block), this.blocks);
    if (found.length > 1) {
      this.blocks += found.length - 1;
      this.settled += found.at(-2).end;
    }
  }
}

class Reader {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.place = 0;
    this.load();
  }

  get ended() {
    return this.line === null;
  }

  // `line` is the line at `place`, null behind the last.
  load() {
    if (this.place >= this.text.length) {
      this.line = null;
      return;
    }
    const end = this.text.indexOf("\n", this.place);
    this.line = end === -1 ? this.text.slice(this.place) : this.text.slice(this.place, end);
    this.after = end === -1 ? this.text.length : end + 1;
  }

  step() {
    const { line } = this;
    this.place = this.after;
    this.load();
    return line;
  }

  get following() {
    const end = this.text.indexOf("\n", this.after);
    return this.text.slice(this.after, end === -1 ? this.text.length : end);
  }

  block() {
    const { line } = this;
    if (!line.trim()) {
      this.step();
      return null;
    }
    const fence = line.match(FENCE);
    if (fence) return this.code(fence);
    const heading = line.match(HEADING);
    if (heading) {
      this.step();
      return node(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2]));
    }
    if (RULE.test(line)) {
      this.step();
      return node("hr");
    }
    if (this.depth < DEEPEST && QUOTE.test(line)) return this.quote();
    if (this.depth < DEEPEST && ITEM.test(line)) return this.list();
    if (line.includes("|") && TABLE_RULE.test(this.following) && this.following.includes("-")) return this.table();
    return this.paragraph();
  }

  code([, fence, language]) {
    this.step();
    const lines = [];
    while (!this.ended && !closes(this.line, fence)) lines.push(this.step());
    if (!this.ended) this.step();
    const copy = node("button", { type: "button", "data-copy": "code", "aria-label": "Copy code" });
    const shown = node("code", {}, highlight(lines.join("\n"), language));
    const head = node("div", { class: "code-head", "data-language": language || "text" }, copy);
    return node("div", { class: "code" }, head, node("pre", { tabindex: "0" }, shown));
  }

  quote() {
    const lines = [];
    while (!this.ended && this.line.trim() && (QUOTE.test(this.line) || !startsBlock(this.line))) {
      lines.push(this.step().replace(QUOTE, ""));
    }
    return node("blockquote", {}, this.inner(lines.join("\n")));
  }

  inner(text) {
    return blocks(text, this.depth + 1).map((each) => each.block);
  }

  list() {
    const first = this.line.match(ITEM);
    const ordered = /\d/.test(first[2]);
    const items = [];
    while (!this.ended) {
      const match = this.line.match(ITEM);
      if (!match || /\d/.test(match[2]) !== ordered || RULE.test(this.line)) break;
      items.push(this.item(match));
    }
    const from = parseInt(first[2], 10);
    return node(ordered ? "ol" : "ul", ordered && from !== 1 ? { start: from } : {}, items);
  }

  item(match) {
    const width = match[0].length;
    const lines = [this.step().slice(width)];
    while (!this.ended) {
      const { line } = this;
      const indent = line.length - line.trimStart().length;
      if (line.trim() && indent < Math.min(width, 2) && startsBlock(line)) break;
      if (line.trim() && indent < 2 && !lines.at(-1).trim()) break;
      if (!line.trim() && !this.goesOn()) {
        this.step();
        break;
      }
      lines.push(this.step().replace(new RegExp(`^[ \\t]{0,${width}}`), ""));
    }
    return node("li", {}, tight(this.inner(task(lines.join("\n")))));
  }

  // Whether an item goes on behind an empty line: by an indented line.
  goesOn() {
    return /^(?:[ \t]*\n)*[ \t]{2,}\S/.test(this.text.slice(this.after, this.after + 400));
  }

  table() {
    const head = cells(this.step());
    this.step();
    const rows = [];
    while (!this.ended && this.line.trim() && this.line.includes("|")) rows.push(cells(this.step()));
    const headings = head.map((each) => node("th", { scope: "col" }, inline(each)));
    // Cells that a row lacks are not made: a wide head and many short rows would be far more than what was written.
    const body = rows.map((row) => node("tr", {}, row.slice(0, head.length).map((each) => node("td", {}, inline(each)))));
    const whole = node("table", {}, node("thead", {}, node("tr", {}, headings)), node("tbody", {}, body));
    return node("div", { class: "wide", tabindex: "0" }, whole);
  }

  paragraph() {
    const lines = [this.step()];
    while (!this.ended && this.line.trim() && !startsBlock(this.line)) lines.push(this.step());
    return node("p", {}, inline(lines.join("\n").trimEnd()));
  }
}

function closes(line, fence) {
  const bare = line.trim();
  return bare.length >= fence.length && bare.startsWith(fence) && bare === fence[0].repeat(bare.length);
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function task(text) {
  return text.replace(/^\[( |x|X)\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
}

// An item that is one paragraph, perhaps with a list below it, needs no paragraph.
function tight(inside) {
  return inside[0]?.tag === "p" ? [...inside[0].children, ...inside.slice(1)] : inside;
}

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return bare.split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
}
