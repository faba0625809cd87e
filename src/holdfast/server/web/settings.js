// The drawer: how turns are sampled, and what the next session begins with. It is kept for this tab of the browser.

import { find } from "/web/draw.js";
import { readTools } from "/web/tools.js";

const KEY = "holdfast-settings";
const NUMBERS = { max_tokens: "limit", temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", seed: "seed" };
const FIELDS = [...Object.values(NUMBERS), "thinking", "system", "tools"];

export class Settings {
  constructor(server) {
    this.server = server;
    this.drawer = find("settings");
    this.restore();
    find("settings-open").addEventListener("click", () => this.open());
    this.drawer.addEventListener("input", () => this.save());
    this.drawer.addEventListener("click", (event) => {
      if (event.target === this.drawer) this.drawer.close();
    });
  }

  open() {
    // An empty field is left to the model: it shows what that is, where the server says it.
    for (const [name, id] of Object.entries(NUMBERS)) {
      find(id).placeholder = this.server.sampling[name] ?? "as the model does";
    }
    this.drawer.showModal();
  }

  get listens() {
    return find("listens").checked;
  }

  // What a turn is sampled with, as far as a person has said.
  turn() {
    const given = {};
    for (const [name, id] of Object.entries(NUMBERS)) {
      const field = find(id);
      if (field.value !== "" && field.validity.valid) given[name] = Number(field.value);
    }
    const thinking = find("thinking").value;
    if (thinking) given.thinking = thinking === "on";
    return given;
  }

  // What the next session begins with; null, and a word about it in the drawer, where the tools are wrong.
  session() {
    const { tools, problem } = readTools(find("tools").value);
    find("tools-problem").textContent = problem;
    find("tools-problem").hidden = !problem;
    if (problem) {
      if (!this.drawer.open) this.open();
      find("tools").focus();
      return null;
    }
    return { tools, system: find("system").value.trim() };
  }

  save() {
    const kept = Object.fromEntries(FIELDS.map((id) => [id, find(id).value]));
    sessionStorage.setItem(KEY, JSON.stringify({ ...kept, listens: this.listens }));
  }

  restore() {
    const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
    for (const id of FIELDS) if (kept[id] !== undefined) find(id).value = kept[id];
    if (kept.listens === false) find("listens").checked = false;
  }
}
