// The keyboard: one table of what each key does, which the help shows as well. Letters are told by their place on the
// keyboard, because Alt changes what some of them write.

import { element, find } from "/web/draw.js";

export class Keys {
  // `acts`: the name of each key below, and what it does.
  constructor(acts) {
    this.acts = acts;
    document.addEventListener("keydown", (event) => this.pressed(event));
    find("help-open").addEventListener("click", () => this.help());
    const rows = SHOWN.flatMap(([keys, says]) => [
      element("dt", {}, ...keys.split(" ").flatMap((key, place) => (place > 0 ? [" ", element("kbd", {}, key)] : [element("kbd", {}, key)]))),
      element("dd", {}, says),
    ]);
    find("keys").append(...rows);
  }

  help() {
    if (!find("help").open) find("help").showModal();
  }

  pressed(event) {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") return this.acts.stop();
    const types = event.target.matches("input, textarea, select");
    if ((event.key === "?" && !types) || (event.ctrlKey && event.key === "/")) {
      event.preventDefault();
      return this.help();
    }
    if (!event.altKey || event.ctrlKey || event.metaKey || event.repeat) return;
    const act = this.acts[event.code];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

const SHOWN = [
  ["Enter", "send; while the model speaks, behind its answer"],
  ["Shift Enter", "a new line"],
  ["Ctrl Enter", "cut in: interrupt, and send"],
  ["Esc", "stop the answer at the word last shown"],
  ["↑", "in the empty box: edit the last message, in a fork"],
  ["Alt R", "regenerate the last answer"],
  ["Alt C", "copy the last answer"],
  ["Alt F", "fork from here"],
  ["Alt N", "new session"],
  ["Alt W", "close the session"],
  ["Alt ,", "session before"],
  ["Alt .", "session behind"],
  ["Alt S", "settings: sampling, system prompt, tools"],
  ["Alt E", "export the conversation"],
  ["Alt I", "import a conversation"],
  ["Alt 1", "Talk; 2 Timeline, 3 Memory, 4 Health"],
  ["Alt L", "dark, light, or as the system"],
  ["← → ↑ ↓", "move between tabs, turns and units of memory"],
  ["?", "this"],
];
