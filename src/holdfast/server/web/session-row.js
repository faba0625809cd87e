// The sessions of the page in a row: choose one, close one. The dot says whether it speaks.

import { element, find, icon, onceAFrame, write } from "/web/draw.js";

export class SessionRow {
  constructor(forest) {
    this.forest = forest;
    this.list = find("session-list");
    this.shown = new Map();
    const draw = onceAFrame(() => this.draw());
    for (const name of ["changed", "chosen", "planted"]) forest.addEventListener(name, draw);
  }

  draw() {
    const { branches, current } = this.forest;
    for (const [branch, item] of this.shown) {
      if (branches.includes(branch)) continue;
      item.remove();
      this.shown.delete(branch);
    }
    branches.forEach((branch, place) => {
      const item = this.shown.get(branch) ?? this.made(branch);
      const [choose, close] = item.children;
      write(choose.firstElementChild, branch.title);
      choose.title = `${branch.title} (${branch.id})`;
      close.setAttribute("aria-label", `Close ${branch.title}`);
      if (branch === current) choose.setAttribute("aria-current", "true");
      else choose.removeAttribute("aria-current");
      if (branch === current && item.dataset.current !== "yes") item.scrollIntoView({ block: "nearest", inline: "nearest" });
      item.dataset.current = branch === current ? "yes" : "no";
      item.dataset.state = branch.gone ? "gone" : branch.speaking ? "speaking" : branch.opened ? "idle" : "away";
      if (this.list.children[place] !== item) this.list.insertBefore(item, this.list.children[place] ?? null);
    });
  }

  made(branch) {
    const choose = element("button", { type: "button", class: "choose", onclick: () => this.forest.choose(branch, true) }, element("span"));
    const close = element("button", { type: "button", class: "shut", onclick: () => this.forest.close(branch) }, icon("close"));
    const item = element("li", {}, choose, close);
    this.shown.set(branch, item);
    return item;
  }
}
