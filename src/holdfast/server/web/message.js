// One turn in the conversation: what was said, what was thought, answered and called, what it cost, and what can be
// done with it. Text from the model becomes nodes by way of descriptions, never markup.

import { CallCards } from "/web/calls.js";
import { copy, element, milliseconds, speed, write } from "/web/draw.js";
import { MarkdownView } from "/web/markdown.js";
import { grow } from "/web/patch.js";

const LONG = 400;

export class TurnView {
  // `acts`: what the buttons do. `edit(text)`, `regenerate()`, `fork()`, `give(call, result)`.
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    // What is long scrolls, and then the keyboard must reach it.
    this.said = element("div", { class: "said", tabindex: turn.input.length > LONG ? "0" : null }, turn.input);
    this.said.hidden = turn.messages !== null;
    this.saidActions = element("div", { class: "said-actions" });
    this.editButton = button("Edit", () => this.startEditing(), "Edit, and go on from there in a fork");
    this.saidActions.append(this.editButton);
    this.thought = document.createTextNode("");
    this.folded = element("summary");
    this.reasoning = element("details", { class: "reasoning" }, this.folded, element("div", {}, this.thought));
    this.answer = element("div", { class: "answer" });
    this.markdown = new MarkdownView(this.answer);
    this.calls = new CallCards((call, result) => acts.give(call, result));
    this.cost = element("div", { class: "cost", "aria-hidden": "true" });
    this.facts = element("p", { class: "facts" });
    this.again = button("Regenerate", () => acts.regenerate());
    this.branchOff = button("Fork", () => acts.fork());
    this.copyButton = button("Copy", () => copy(turn.text, this.copyButton));
    this.actions = element("div", { class: "actions" }, this.copyButton, this.again, this.branchOff);
    this.foot = element("div", { class: "foot" }, this.facts, this.actions);
    this.notes = element("div", { class: "notes" });
    this.whole = element("article", { class: "turn" }, this.said, this.saidActions, this.reasoning, this.answer,
      this.calls.list, this.cost, this.foot, this.notes);
  }

  // `free`: nothing speaks in the session, and it can be changed.
  draw({ last, waits, free }) {
    const { turn, whole } = this;
    this.markdown.show(turn.text);
    grow(this.thought, turn.reasoning);
    this.reasoning.hidden = !turn.reasoning;
    const thinks = turn.state === "speaking" && !turn.text && turn.calls.length === 0;
    whole.dataset.thinks = thinks ? "yes" : "no";
    write(this.folded, `${thinks ? "Thinking" : "Thought"}: ${turn.reasoning.length} characters`);
    this.calls.draw(turn.calls, waits);
    turn.drawn = turn.text;
    turn.shown = turn.settled;
    whole.dataset.state = turn.state;
    whole.dataset.counts = turn.counts || ["waiting", "speaking", "past"].includes(turn.state) ? "yes" : "no";
    const silent = turn.state !== "speaking" || turn.reasoning || turn.calls.length > 0;
    this.answer.hidden = turn.state === "waiting" || (!turn.text && Boolean(silent));
    write(this.facts, footnote(turn));
    this.drawCost(turn.usage);
    this.drawActions(last, free);
    this.drawNotes();
  }

  drawActions(last, free) {
    const { turn } = this;
    this.actions.hidden = !turn.counts;
    this.copyButton.hidden = !turn.text;
    this.again.hidden = !last;
    this.again.disabled = this.branchOff.disabled = this.editButton.disabled = !free;
    this.saidActions.hidden = !turn.counts || turn.messages !== null || Boolean(this.editor);
  }

  // How much of the turn was in memory, was computed, and was said.
  drawCost(usage) {
    this.cost.hidden = !usage;
    if (!usage || this.cost.childElementCount > 0) return;
    const whole = usage.prompt_tokens + usage.completion_tokens || 1;
    const parts = { cached: usage.cached_tokens, computed: usage.computed_tokens, generated: usage.completion_tokens };
    for (const [name, tokens] of Object.entries(parts)) {
      const part = element("i", { class: name });
      part.style.width = `${(tokens / whole) * 100}%`;
      this.cost.append(part);
    }
  }

  drawNotes() {
    const { notes } = this.turn;
    while (this.notes.childElementCount < notes.length) {
      this.notes.append(element("p", { class: "note" }, notes[this.notes.childElementCount]));
    }
  }

  startEditing() {
    if (this.editor) return;
    const box = element("textarea", { rows: "3", "aria-label": "Edited message" });
    box.value = this.turn.input;
    const send = element("button", { type: "submit", class: "primary" }, "Send in a fork");
    const leave = button("Cancel", () => this.stopEditing());
    this.editor = element("form", { class: "editor" }, box, element("div", { class: "row" }, leave, send));
    this.editor.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = box.value.trim();
      this.stopEditing();
      if (text) this.acts.edit(text);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.stopEditing();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.editor.requestSubmit();
      }
    });
    this.said.after(this.editor);
    this.said.hidden = this.saidActions.hidden = true;
    box.focus();
  }

  stopEditing() {
    this.editor.remove();
    this.editor = null;
    this.said.hidden = this.saidActions.hidden = false;
    this.editButton.focus();
  }
}

function button(label, onclick, title = null) {
  return element("button", { type: "button", title, onclick }, label);
}

function footnote(turn) {
  if (turn.state === "past") return "said before this session";
  if (turn.state === "waiting") return "Waiting for its turn…";
  if (turn.state === "speaking") return `${turn.heard} tokens…`;
  if (!turn.usage) return turn.problem;
  const { computed_tokens: computed, cached_tokens: cached, completion_tokens: said, ahead_tokens: ahead } = turn.usage;
  const parts = [
    ahead ? `${computed} computed, ${ahead} while you typed` : `${computed} computed`,
    `${cached} cached`,
    `first token ${milliseconds(turn.timing.ttft_ms)}`,
    `${said} tokens in ${milliseconds(turn.timing.total_ms)}`,
  ];
  const rate = speed(turn);
  if (rate !== null) parts.push(`${Math.round(rate)} a second`);
  if (turn.problem) parts.push(turn.problem);
  else if (turn.state === "cut") parts.push(`cut after ${turn.shown} tokens, and kept`);
  return parts.join(" · ");
}
