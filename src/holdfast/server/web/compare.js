// Two turns side by side: the answers of two branches from where they part.

import { element, figures } from "/web/draw.js";
import { MarkdownView } from "/web/markdown.js";

export class Comparison {
  constructor(place) {
    this.place = place;
  }

  show(one, other) {
    const shared = sharedTurns(one.branch, other.branch);
    const close = element("button", { type: "button", onclick: () => (this.place.hidden = true) }, "Close");
    const said = shared > 0 ? `They share ${shared} turn${shared === 1 ? "" : "s"}.` : "They share no turn.";
    const head = element("div", { class: "row" }, element("h2", {}, "Compared"), element("span", { class: "quiet" }, said), close);
    this.place.replaceChildren(head, element("div", { class: "pair" }, column(one, shared), column(other, shared)));
    this.place.hidden = false;
    this.place.scrollIntoView({ block: "nearest" });
  }
}

function sharedTurns(one, other) {
  const [ours, theirs] = [one.history, other.history];
  let count = 0;
  while (count < ours.length && ours[count].id === theirs[count]?.id) count++;
  return one === other ? 0 : count;
}

// The turns of a branch from where it parts to the one that was chosen; only that one where it is shared.
function column({ branch, turn, number }, shared) {
  const turns = number > shared && shared > 0 ? branch.history.slice(shared, number) : [turn];
  const parts = turns.flatMap((each) => {
    const answer = element("div", { class: "answer" });
    new MarkdownView(answer).show(each.text || "…");
    const facts = element("p", { class: "quiet" }, figures({ turn: each }).replaceAll("\n", " · "));
    return [element("p", { class: "asked" }, each.messages ? "results of tools" : each.input), answer, facts];
  });
  const title = element("h3", {}, `Turn ${number} of “${branch.title}”`);
  return element("section", { "aria-label": `Turn ${number} of ${branch.id}` }, title, ...parts);
}
