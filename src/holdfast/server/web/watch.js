// What happens to sessions, told from two looks at the memory: moves between tiers, and memory that is given up. The
// page's own sessions come with their notes. The list is short, and a crowd is one line.

import { element, find, plural } from "/web/draw.js";

const SHOWN_MAX = 30;
const A_TIME = 4;
const TIERS = ["device", "host", "disk"];

export class Watch {
  constructor() {
    this.before = null;
    this.list = find("events");
  }

  clear() {
    this.before = null;
  }

  look(sessions) {
    if (this.before) {
      const news = [...sessions].map(([name, held]) => moved(name, this.before.get(name), held)).filter(Boolean);
      for (const text of news.slice(0, A_TIME)) this.tell(text);
      if (news.length > A_TIME) this.tell(`${news.length - A_TIME} more sessions moved`);
    }
    this.before = sessions;
  }

  tell(text) {
    const at = new Date().toLocaleTimeString([], { hour12: false });
    this.list.prepend(element("li", {}, element("time", {}, at), text));
    while (this.list.childElementCount > SHOWN_MAX) this.list.lastElementChild.remove();
    find("no-events").hidden = true;
  }
}

// A session moved where one tier lost all that another one won.
export function moved(name, before, held) {
  if (!before) return null;
  const home = (each) => TIERS.find((tier) => each[tier] > 0) ?? null;
  const [from, to] = [home(before), home(held)];
  if (from === to || from === null || to === null) return null;
  const what = `${plural(held[to], "unit")} of ${name}`;
  return to === "device" ? `${what} restored from ${from}` : `${what} spilled from ${from} to ${to}`;
}
