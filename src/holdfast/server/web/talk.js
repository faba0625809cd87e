// The conversation: one session's turns, and the box to type in. Text from the model only ever becomes text.

import { CallCards } from "/web/calls.js";
import { element, milliseconds, onceAFrame } from "/web/draw.js";
import { readTools } from "/web/tools.js";

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
    this.tools = document.getElementById("tools");
    this.toolsProblem = document.getElementById("tools-problem");
    document.getElementById("fresh").addEventListener("click", () => this.begin());
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

  // A new session, with the tools that were given for it; what is wrong with them is said instead.
  begin() {
    const { tools, problem } = readTools(this.tools.value);
    this.toolsProblem.textContent = problem;
    this.toolsProblem.hidden = !problem;
    if (problem) {
      document.getElementById("tools-box").open = true;
      this.tools.focus();
      return;
    }
    this.forest.plant(tools);
    this.said.focus();
  }

  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send(event.ctrlKey || event.metaKey ? "interrupt" : "after");
  }

  send(mode) {
    const text = this.said.value.trim();
    if (!text) return;
    if (this.forest.current.gone) this.forest.plant(this.forest.current.tools);
    this.forest.current.say(text, this.tokens, mode);
    this.said.value = "";
    this.said.focus();
  }

  get tokens() {
    return Number(this.limit.value) || 0;
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
    document.getElementById("branch").textContent = branch.gone || branch.problem || described(branch);
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
      const said = element("div", { class: "said" }, turn.input);
      said.hidden = turn.messages !== null;
      const thought = document.createTextNode("");
      const folded = element("summary");
      const reasoning = element("details", { class: "reasoning" }, folded, element("div", {}, thought));
      const calls = new CallCards((call, result) => this.forest.current.giveResult(turn, call, result, this.tokens));
      const whole = element("article", { class: "turn" }, said, reasoning, answer, calls.list, foot);
      node = { turn: whole, text, answer, foot, thought, folded, reasoning, calls };
      this.drawn.set(turn, node);
      this.transcript.append(whole);
    }
    // Only what is new is appended, so that a long answer costs no more at its end than at its start.
    grow(node.text, turn.text);
    grow(node.thought, turn.reasoning);
    node.reasoning.hidden = !turn.reasoning;
    const thinks = turn.state === "speaking" && !turn.text && turn.calls.length === 0;
    node.folded.textContent = `${thinks ? "Thinking" : "Thought"}: ${turn.reasoning.length} characters`;
    node.calls.draw(turn.calls, turn === this.forest.current.calling);
    turn.drawn = turn.text;
    turn.shown = turn.settled;
    node.turn.dataset.state = turn.state;
    node.turn.dataset.counts = turn.counts || ["waiting", "speaking"].includes(turn.state) ? "yes" : "no";
    const silent = turn.state !== "speaking" || turn.reasoning || turn.calls.length > 0;
    node.answer.hidden = turn.state === "waiting" || (!turn.text && silent);
    node.foot.textContent = footnote(turn);
  }
}

function grow(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function described(branch) {
  const names = branch.tools.map((tool) => tool.function.name);
  return names.length > 0 ? `Session ${branch.id}, tools: ${names.join(", ")}` : `Session ${branch.id}`;
}

function footnote(turn) {
  if (turn.state === "waiting") return "Waiting for its turn…";
  if (turn.state === "speaking") return `${turn.heard} tokens…`;
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
