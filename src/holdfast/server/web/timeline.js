// All sessions of the page as a tree. A box is a turn: point at it for its figures, choose it to go back or to fork,
// drag it onto another to compare their answers.

import { Comparison } from "/web/compare.js";
import { drawing, element, figures, find, onceAFrame } from "/web/draw.js";
import { MarkdownView } from "/web/markdown.js";
import { BOX, layOut } from "/web/tree-layout.js";

const DRAG_PIXELS = 6;

export class Timeline {
  constructor(forest) {
    this.forest = forest;
    this.tree = find("tree");
    this.card = find("turn-card");
    this.tip = find("tip");
    this.comparison = new Comparison(find("compare"));
    this.chosen = null;
    this.marked = null;
    this.dragged = null;
    this.boxes = [];
    this.draw = onceAFrame(() => this.redraw());
    for (const name of ["changed", "chosen", "planted"]) forest.addEventListener(name, this.draw);
    this.tree.addEventListener("keydown", (event) => this.pressed(event));
    this.tree.addEventListener("pointermove", (event) => this.pointed(event));
    this.tree.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.tree.addEventListener("pointerdown", (event) => this.grabbed(event));
    document.addEventListener("pointerup", (event) => this.dropped(event));
  }

  redraw() {
    if (this.tree.closest("[role=tabpanel]").hidden || this.dragged?.moves) return;
    const focused = document.activeElement?.dataset?.place;
    const { branches } = this.forest;
    const empty = !branches.some((branch) => branch.turns.length > 0);
    find("no-turns").hidden = !empty;
    find("tree-legend").hidden = empty;
    const { lanes, width, height } = layOut(branches);
    this.boxes = lanes.flatMap((lane) => lane.boxes);
    this.chosen = this.boxes.find((box) => box.turn.id === this.chosen?.turn.id && box.branch === this.chosen.branch) ?? null;
    const stems = lanes.filter((lane) => lane.stem).map(stem);
    const whole = drawing("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ...stems, ...lanes.map((lane) => this.lane(lane)));
    this.tree.replaceChildren(whole);
    this.drawCard();
    if (focused) this.tree.querySelector(`[data-place="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  lane({ branch, y, boxes, start }) {
    const current = branch === this.forest.current;
    const talk = () => this.forest.choose(branch, true);
    const name = drawing("text", { x: start, y: y - 9, class: "lane-name" }, short28(branch.title));
    const label = drawing("g", {
      class: "lane-head", role: "button", tabindex: "0", "data-place": `talk ${branch.id}`, "data-current": current ? "yes" : "no",
      "aria-label": `Talk in ${branch.id}: ${branch.title}`, onclick: talk,
    }, drawing("rect", { x: start - 4, y: y - 26, width: 240, height: 22, fill: "transparent" }), name);
    const line = boxes.length > 1 ? [drawing("path", { class: "stem", d: `M${boxes[0].x} ${y + BOX / 2}H${boxes.at(-1).x}` })] : [];
    return drawing("g", { class: "lane" }, label, ...line, ...boxes.map((box) => this.box(box)));
  }

  box(box) {
    const { turn, x, y, width, number, branch } = box;
    const usage = turn.usage ?? { prompt_tokens: 1, cached_tokens: 0, computed_tokens: 0, completion_tokens: turn.heard };
    const own = usage.computed_tokens + usage.completion_tokens || 1;
    const asked = Math.round((width * usage.computed_tokens) / own);
    const cached = Math.round((width * usage.cached_tokens) / Math.max(1, usage.prompt_tokens));
    const id = `clip-${branch.id}-${number}`;
    const inner = drawing("g", { "clip-path": `url(#${id})` },
      drawing("rect", { x, y, width, height: BOX, class: "part-said" }),
      drawing("rect", { x, y, width: asked, height: BOX, class: "part-asked" }),
      drawing("rect", { x, y: y + BOX - 6, width, height: 6, class: "part-computed" }),
      drawing("rect", { x, y: y + BOX - 6, width: cached, height: 6, class: "part-cached" }));
    const chosen = this.chosen?.turn === turn && this.chosen.branch === branch;
    const made = drawing("g", {
      class: "node", role: "button", tabindex: chosen || (!this.chosen && box === this.boxes[0]) ? "0" : "-1",
      "data-place": `turn ${branch.id} ${number}`, "data-chosen": chosen ? "yes" : "no", "data-state": turn.state,
      "data-marked": this.marked?.turn === turn ? "yes" : "no", "aria-label": `Turn ${number} of ${branch.id}. ${figures(box).replaceAll("\n", ". ")}`,
    },
    drawing("clipPath", { id }, drawing("rect", { x, y, width, height: BOX, rx: 8 })), inner,
    drawing("rect", { x, y, width, height: BOX, rx: 8, class: "frame" }),
    drawing("text", { x: x + width / 2, y: y + 19, class: "count" }, String(number)));
    made.box = box;
    return made;
  }

  choose(box) {
    this.chosen = box;
    this.redraw();
    this.tree.querySelector(".node[data-chosen=yes]")?.focus({ preventScroll: true });
  }

  drawCard() {
    const box = this.chosen;
    this.card.hidden = !box;
    if (!box) return;
    const { branch, turn, number } = box;
    const focused = document.activeElement?.closest("#turn-card") ? document.activeElement.textContent : null;
    const disabled = branch.opened && !branch.speaking ? null : "";
    const act = (label, onclick, off = null) =>
      element("button", { type: "button", "aria-label": `${label}: ${branch.id}, turn ${number}`, disabled: off, onclick }, label);
    const answer = element("div", { class: "answer" });
    const calls = turn.calls.map((call) => `calls ${call.name}`).join(", ");
    new MarkdownView(answer).show(turn.text || calls || "…");
    this.card.replaceChildren(
      element("p", { class: "quiet" }, `Turn ${number} of ${branch.id} · ${figures(box).replaceAll("\n", " · ")}`),
      element("p", { class: "asked" }, turn.messages ? "results of tools" : turn.input), answer,
      element("div", { class: "row" },
        act("Rewind to here", () => branch.rewind(number), disabled), act("Fork from here", () => branch.fork(number), disabled),
        act("Talk here", () => this.forest.choose(branch, true)), act(this.marked ? "Compare with the marked turn" : "Compare", () => this.mark(box))),
    );
    if (focused) [...this.card.querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
  }

  // The first turn that is marked waits for the second.
  mark(box) {
    const first = this.marked;
    this.marked = first ? null : box;
    if (first && first.turn !== box.turn) this.comparison.show(first, box);
    this.redraw();
  }

  // --- keyboard and pointer -------------------------------------------------------------------------

  pressed(event) {
    const at = event.target.box;
    if (["Enter", " "].includes(event.key) && event.target.matches("[role=button]")) {
      event.preventDefault();
      if (at) this.choose(at);
      else event.target.dispatchEvent(new MouseEvent("click"));
    }
    if (!at) return;
    if (event.key === "c") return this.mark(at);
    const next = this.neighbour(at, event.key);
    if (!next) return;
    event.preventDefault();
    this.choose(next);
  }

  neighbour(at, key) {
    const middle = (box) => box.x + box.width / 2;
    const near = (boxes) => boxes.sort((one, other) => distance(one) - distance(other))[0] ?? null;
    const distance = (box) => Math.abs(box.y - at.y) * 4 + Math.abs(middle(box) - middle(at));
    const { boxes } = this;
    switch (key) {
      case "ArrowRight": return near(boxes.filter((box) => box.x > at.x && box.y >= at.y));
      case "ArrowLeft": return near(boxes.filter((box) => box.x < at.x && box.y <= at.y));
      case "ArrowDown": return near(boxes.filter((box) => box.y > at.y));
      case "ArrowUp": return near(boxes.filter((box) => box.y < at.y));
      default: return null;
    }
  }

  boxAt(event) {
    return document.elementFromPoint(event.clientX, event.clientY)?.closest?.(".node")?.box ?? null;
  }

  grabbed(event) {
    const box = this.boxAt(event);
    if (box) this.dragged = { box, x: event.clientX, y: event.clientY, moves: false };
  }

  pointed(event) {
    const { dragged } = this;
    if (dragged && Math.hypot(event.clientX - dragged.x, event.clientY - dragged.y) > DRAG_PIXELS) dragged.moves = true;
    const box = this.boxAt(event);
    for (const node of this.tree.querySelectorAll(".node")) node.dataset.over = dragged?.moves && node.box === box && box !== dragged.box ? "yes" : "no";
    this.tip.hidden = !box && !dragged?.moves;
    if (this.tip.hidden) return;
    this.tip.textContent = dragged?.moves ? (box && box !== dragged.box ? "Compare with this" : "Drop on another turn to compare") : figures(box);
    this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${event.clientY + 18}px`;
  }

  dropped(event) {
    const { dragged } = this;
    this.dragged = null;
    if (!dragged) return;
    const box = this.boxAt(event);
    if (dragged.moves && box && box.turn !== dragged.box.turn) this.comparison.show(dragged.box, box);
    else if (!dragged.moves && box) this.choose(box);
    this.tip.hidden = true;
    this.draw();
  }
}

const short28 = (text) => (text.length > 28 ? `${text.slice(0, 27)}…` : text);

// From the end of the parent's turn down to the lane of the fork.
function stem({ stem: above, y, start }) {
  const x = above.x + above.width;
  const from = above.y + BOX / 2;
  const to = y + BOX / 2;
  const path = `M${x} ${from} C${x + 20} ${from} ${x - 6} ${to} ${start} ${to}`;
  return drawing("path", { d: path, class: "stem" });
}
