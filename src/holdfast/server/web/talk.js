// The conversation: one session's turns, and the box to type in. Text from the model only ever becomes text.

import { element, milliseconds, onceAFrame } from "/web/draw.js";

export class Talk {
  constructor(forest) {
    this.forest = forest;
    this.transcript = document.getElementById("transcript");
    this.welcome = document.getElementById("welcome");
    this.said = document.getElementById("said");
    this.limit = document.getElementById("limit");
    this.cutIn = document.getElementById("cut-in");
    this.stop = document.getElementById("interrupt");
    this.drawn = new Map();
    this.changed = new Set();
    this.drawSoon = onceAFrame(() => this.update());
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send("after");
    });
    this.said.addEventListener("keydown", (event) => this.typed(event));
    this.cutIn.addEventListener("click", () => this.send("interrupt"));
    this.stop.addEventListener("click", () => this.interrupt());
    document.getElementById("fresh").addEventListener("click", () => {
      forest.plant();
      this.said.focus();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.interrupt();
    });
    forest.addEventListener("chosen", () => this.redraw());
    forest.addEventListener("changed", (event) => {
      if (event.detail.branch !== forest.current) return;
      this.changed.add(event.detail.turn);
      this.drawSoon();
    });
  }

  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send(event.ctrlKey || event.metaKey ? "interrupt" : "after");
  }

  send(mode) {
    const text = this.said.value.trim();
    if (!text) return;
    if (this.forest.current.gone) this.forest.plant();
    this.forest.current.say(text, Number(this.limit.value) || 0, mode);
    this.said.value = "";
    this.said.focus();
  }

  interrupt() {
    this.forest.current.interrupt();
  }

  redraw() {
    for (const node of this.drawn.values()) node.turn.remove();
    this.drawn.clear();
    this.changed.add(null);
    this.update();
  }

  // Once a frame, however many words have come: only the turns that changed, unless it is not known which.
  update() {
    const branch = this.forest.current;
    const follows = this.transcript.scrollHeight - this.transcript.scrollTop - this.transcript.clientHeight < 80;
    if ([...this.changed].every((turn) => this.drawn.has(turn))) this.changed.forEach((turn) => this.draw(turn));
    else this.drawAll(branch);
    this.changed.clear();
    this.welcome.hidden = branch.turns.length > 0;
    this.stop.disabled = !branch.speaking;
    this.cutIn.hidden = !branch.speaking;
    document.getElementById("branch").textContent = branch.gone || branch.problem || `Session ${branch.id}`;
    if (follows) this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  drawAll(branch) {
    for (const [turn, node] of this.drawn) {
      if (!branch.turns.includes(turn)) {
        node.turn.remove();
        this.drawn.delete(turn);
      }
    }
    for (const turn of branch.turns) this.draw(turn);
  }

  draw(turn) {
    let node = this.drawn.get(turn);
    if (!node) {
      const text = document.createTextNode("");
      const answer = element("div", { class: "answer" }, text);
      const foot = element("p", { class: "foot" });
      const whole = element("article", { class: "turn" }, element("div", { class: "said" }, turn.input), answer, foot);
      node = { turn: whole, text, answer, foot };
      this.drawn.set(turn, node);
      this.transcript.append(whole);
    }
    // Only what is new is appended, so that a long answer costs no more at its end than at its start.
    if (turn.text.startsWith(node.text.data)) node.text.appendData(turn.text.slice(node.text.data.length));
    else node.text.data = turn.text;
    turn.drawn = turn.text;
    turn.shown = turn.heard;
    node.turn.dataset.state = turn.state;
    node.turn.dataset.counts = turn.counts || ["waiting", "speaking"].includes(turn.state) ? "yes" : "no";
    node.answer.hidden = turn.state === "waiting" || (!turn.text && turn.state !== "speaking");
    node.foot.textContent = footnote(turn);
  }
}

function footnote(turn) {
  if (turn.state === "waiting") return "Waiting for its turn…";
  if (turn.state === "speaking") return `${turn.shown} tokens…`;
  if (!turn.usage) return turn.problem;
  const { computed_tokens: computed, cached_tokens: cached, completion_tokens: said } = turn.usage;
  const parts = [
    `${computed} computed`,
    `${cached} cached`,
    `first token ${milliseconds(turn.timing.ttft_ms)}`,
    `${said} tokens in ${milliseconds(turn.timing.total_ms)}`,
  ];
  if (turn.problem) parts.push(turn.problem);
  else if (turn.state === "cut") parts.push(`cut after ${turn.shown} tokens, and kept`);
  return parts.join(" · ");
}
