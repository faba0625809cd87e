// All sessions of the page as a tree: a column for each branch, a row for each turn. Branches stand side by side.

import { element, onceAFrame } from "/web/draw.js";

export class Timeline {
  constructor(forest) {
    this.forest = forest;
    this.tree = document.getElementById("tree");
    this.empty = document.getElementById("no-turns");
    this.draw = onceAFrame(() => this.redraw());
    for (const name of ["changed", "chosen", "planted"]) forest.addEventListener(name, this.draw);
  }

  redraw() {
    if (this.tree.closest("[role=tabpanel]").hidden) return;
    const focused = document.activeElement?.dataset?.place;
    const branches = this.forest.branches;
    this.empty.hidden = branches.some((branch) => branch.turns.length > 0);
    const cells = [];
    branches.forEach((branch, place) => {
      const column = place + 1;
      cells.push(this.head(branch, column));
      const history = branch.history;
      history.forEach((turn, row) => {
        // What both branches have is drawn once, in the parent's column, as long as the parent has it.
        const shared = row < branch.forkedAt && branch.parent?.history[row]?.id === turn.id;
        if (shared && row < branch.forkedAt - 1) return;
        cells.push(this.node(branch, turn, row, column, shared));
      });
      const speaking = branch.speaking;
      if (speaking) cells.push(this.node(branch, speaking, history.length, column, false));
    });
    this.tree.replaceChildren(...cells);
    if (focused) this.tree.querySelector(`[data-place="${CSS.escape(focused)}"]`)?.focus();
  }

  head(branch, column) {
    const current = branch === this.forest.current;
    const name = element("strong", {}, branch.id);
    const talk = element(
      "button",
      { "data-place": `talk ${branch.id}`, "aria-label": `Talk in ${branch.id}`, onclick: () => this.forest.choose(branch, true) },
      current ? "Talking here" : "Talk here",
    );
    const head = element("div", { class: "branch-head", "data-current": current ? "yes" : "no" }, name, talk);
    if (branch.parent) head.append(element("span", { class: "quiet" }, `fork of ${branch.parent.id} at turn ${branch.forkedAt}`));
    if (branch.gone) head.append(element("span", { class: "quiet" }, branch.gone));
    head.style.gridRow = 1;
    head.style.gridColumn = column;
    return head;
  }

  node(branch, turn, row, column, shared) {
    const number = row + 1;
    const node = element("div", { class: shared ? "node stem" : "node" });
    node.append(element("p", { class: "who" }, shared ? `from turn ${number} of ${branch.parent.id}` : `turn ${number}`));
    if (!shared) {
      const calls = turn.calls.map((call) => `calls ${call.name}`).join(", ");
      const input = turn.messages ? "results of tools" : turn.input;
      node.append(element("p", {}, input), element("p", {}, turn.text || calls || "…"));
      const rewind = () => branch.rewind(number);
      const fork = () => branch.fork(number);
      node.append(
        this.button(branch, "Rewind to here", `rewind ${number}`, rewind),
        " ",
        this.button(branch, "Fork from here", `fork ${number}`, fork),
      );
    }
    node.style.gridRow = row + 2;
    node.style.gridColumn = column;
    return node;
  }

  button(branch, label, what, onclick) {
    const disabled = branch.opened && !branch.speaking ? null : "";
    const named = `${label}: ${branch.id}, turn ${what.split(" ")[1]}`;
    return element("button", { "data-place": `${what} ${branch.id}`, "aria-label": named, disabled, onclick }, label);
  }
}
