// The conversation of one session, and the box to type in.

import { copy, element, find, onceAFrame, write } from "/web/draw.js";
import { heardTokens } from "/web/holders.js";
import { TurnView } from "/web/message.js";

const STARTERS = [
  "Tell me a story about a lighthouse.",
  "Write a Python function that reverses a list.",
  "Explain a KV cache in three sentences.",
];

export class Talk {
  constructor(forest, settings) {
    this.forest = forest;
    this.settings = settings;
    this.transcript = find("transcript");
    this.welcome = find("welcome");
    this.said = find("said");
    this.cutIn = find("cut-in");
    this.stop = find("interrupt");
    this.follows = true;
    this.drawn = new Map();
    this.changed = new Set();
    this.drawSoon = onceAFrame(() => this.update());
    this.listen();
    for (const text of STARTERS) {
      find("starters").append(element("li", {}, element("button", { type: "button", onclick: () => this.speak(text) }, text)));
    }
    forest.addEventListener("chosen", () => this.redraw());
    forest.addEventListener("changed", (event) => {
      if (event.detail.branch !== forest.current) return;
      this.changed.add(event.detail.turn);
      this.drawSoon();
    });
  }

  listen() {
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send("after");
    });
    this.said.addEventListener("keydown", (event) => this.pressed(event));
    this.said.addEventListener("input", () => this.forest.current.type(this.said.value, this.settings.listens));
    this.cutIn.addEventListener("click", () => this.send("interrupt"));
    this.stop.addEventListener("click", () => this.interrupt());
    // A reader at the end stays there, also when the box below grows.
    this.transcript.addEventListener("scroll", () => (this.follows = this.atEnd));
    new ResizeObserver(() => this.follow()).observe(this.transcript);
    this.transcript.addEventListener("click", (event) => {
      const button = event.target.closest("[data-copy]");
      if (button) copy(button.closest(".code").querySelector("code").textContent, button);
    });
  }

  // A new session, with the tools and the system prompt that were given for it.
  begin() {
    const given = this.settings.session();
    if (given === null) return;
    this.forest.plant(given);
    this.said.focus();
  }

  pressed(event) {
    if (event.key === "ArrowUp" && !this.said.value) {
      event.preventDefault();
      this.editLast();
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send(event.ctrlKey || event.metaKey ? "interrupt" : "after");
  }

  send(mode) {
    const text = this.said.value.trim();
    if (!text) return;
    this.said.value = "";
    this.speak(text, mode);
  }

  // A session that is gone is begun again: the new one is told what was said.
  speak(text, mode = "after") {
    const { forest } = this;
    forest.current.typed = "";
    if (forest.current.gone) forest.replant(forest.current);
    forest.current.say(text, this.settings.turn(), mode);
    this.said.focus();
  }

  interrupt() {
    this.forest.current.interrupt();
  }

  get last() {
    return this.forest.current.history.at(-1) ?? null;
  }

  editLast() {
    if (this.last) this.drawn.get(this.last)?.startEditing();
  }

  regenerateLast() {
    if (this.last) this.forest.current.regenerate(this.last);
  }

  copyLast() {
    if (this.last) copy(this.last.text, this.drawn.get(this.last)?.copyButton);
  }

  redraw() {
    for (const view of this.drawn.values()) view.whole.remove();
    this.drawn.clear();
    this.changed.add(null);
    this.said.value = this.forest.current.typed;
    this.follows = true;
    this.update();
  }

  // Once a frame, however many words have come: only the turns that changed, unless it is not known which.
  update() {
    const branch = this.forest.current;
    const speaks = branch.speaking;
    const one = [...this.changed].every((turn) => this.drawn.has(turn) && turn === speaks);
    if (one) this.changed.forEach((turn) => this.draw(branch, turn));
    else this.drawAll(branch);
    this.changed.clear();
    this.welcome.hidden = branch.turns.length + branch.past.length > 0;
    this.stop.disabled = this.stop.hidden = !speaks;
    this.cutIn.hidden = !speaks;
    write(find("branch"), branch.gone || branch.problem || described(branch));
    this.drawAhead(branch);
    this.follow();
  }

  get atEnd() {
    return this.transcript.scrollHeight - this.transcript.scrollTop - this.transcript.clientHeight < 80;
  }

  follow() {
    if (this.follows) this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  drawAll(branch) {
    const turns = [...branch.past, ...branch.turns];
    for (const [turn, view] of this.drawn) {
      if (!turns.includes(turn)) {
        view.whole.remove();
        this.drawn.delete(turn);
      }
    }
    for (const turn of turns) this.draw(branch, turn);
  }

  draw(branch, turn) {
    let view = this.drawn.get(turn);
    if (!view) {
      view = new TurnView(turn, this.acts(branch, turn));
      this.drawn.set(turn, view);
      this.transcript.append(view.whole);
    }
    const free = branch.opened && !branch.speaking;
    view.draw({ last: turn === branch.history.at(-1), waits: turn === branch.calling, free });
  }

  acts(branch, turn) {
    return {
      edit: (text) => branch.edit(turn, text, this.settings.turn()),
      regenerate: () => branch.regenerate(turn),
      fork: () => branch.fork(branch.history.indexOf(turn) + 1),
      give: (call, result) => branch.giveResult(turn, call, result, this.settings.turn()),
    };
  }

  // What the server says of sessions that listen, once a second.
  hear(report) {
    for (const branch of this.forest.branches) {
      branch.ahead = report.listening.find((each) => each.session === branch.id) ?? null;
    }
    this.drawAhead(this.forest.current);
  }

  drawAhead({ ahead }) {
    write(find("ahead"), ahead ? heardTokens(ahead) : "");
    find("ahead-bar").firstElementChild.style.width = ahead ? `${(ahead.ahead / Math.max(1, ahead.heard)) * 100}%` : "0";
  }
}

function described(branch) {
  const names = branch.tools.map((tool) => tool.function.name);
  return names.length > 0 ? `Session ${branch.id}, tools: ${names.join(", ")}` : `Session ${branch.id}`;
}
