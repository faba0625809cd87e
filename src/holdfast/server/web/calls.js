// The tool calls of one turn as cards: name, arguments, and the result, which a person may type.

import { element } from "/web/draw.js";

export class CallCards {
  // `give(call, result)` is called when a result was typed.
  constructor(give) {
    this.give = give;
    this.list = element("ul", { class: "calls", "aria-label": "Tool calls" });
    this.cards = new Map();
  }

  // `waits`: the session waits for the results.
  draw(calls, waits) {
    for (const [id, card] of this.cards) {
      if (!calls.some((call) => call.id === id)) {
        card.whole.remove();
        this.cards.delete(id);
      }
    }
    this.list.hidden = calls.length === 0;
    for (const call of calls) this.drawOne(call, waits);
  }

  drawOne(call, waits) {
    const card = this.cards.get(call.id) ?? this.newCard(call);
    card.call = call;
    const shown = call.outcome === "complete" ? pretty(call.arguments) : call.arguments;
    if (card.arguments.textContent !== shown) card.arguments.textContent = shown;
    card.outcome.textContent = ["", "complete"].includes(call.outcome) ? "" : ` (${call.outcome})`;
    card.form.hidden = !waits || call.result !== null;
    card.result.hidden = call.result === null;
    card.result.textContent = call.result ?? "";
  }

  newCard(call) {
    const outcome = element("span", { class: "quiet" });
    const shown = element("pre", { class: "arguments", tabindex: "0", "aria-label": `Arguments of ${call.name}` });
    const typed = element("input", { "aria-label": `Result of ${call.name}`, placeholder: "Result", autocomplete: "off" });
    const form = element("form", {}, typed, element("button", { type: "submit" }, "Send result"));
    const result = element("pre", { class: "result", tabindex: "0", "aria-label": `Result of ${call.name}` });
    const whole = element("li", { class: "call" }, element("strong", {}, call.name), outcome, shown, form, result);
    const card = { whole, outcome, arguments: shown, form, result, call };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (typed.value.trim()) this.give(card.call, typed.value.trim());
    });
    this.cards.set(call.id, card);
    this.list.append(whole);
    return card;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
