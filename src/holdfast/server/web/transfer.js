// A conversation as a file: written from a session, and read into a new one, which is told it with its first turn.

import { element, find } from "/web/draw.js";
import { newTurn } from "/web/turn.js";
import { readTools } from "/web/tools.js";

const FORMAT = "holdfast-conversation";
const VERSION = 1;
const BYTES_MAX = 16 << 20;
const TURNS_MAX = 2000;

export class Transfer {
  constructor(forest, drawer) {
    this.forest = forest;
    this.drawer = drawer;
    this.problem = find("import-problem");
    find("export").addEventListener("click", () => this.save());
    find("import").addEventListener("click", () => this.ask());
    find("import-file").addEventListener("change", (event) => this.load(event.target));
  }

  save() {
    const branch = this.forest.current;
    const text = JSON.stringify(written(branch), null, 2);
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const name = branch.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
    element("a", { href: address, download: `${name}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  ask() {
    find("import-file").click();
  }

  async load(input) {
    const file = input.files[0];
    input.value = "";
    if (!file) return;
    const { given, problem } = file.size > BYTES_MAX ? { problem: "The file is larger than 16 MiB." } : read(await file.text());
    this.problem.textContent = problem;
    this.problem.hidden = !problem;
    if (problem) {
      if (!this.drawer.open) this.drawer.showModal();
      return;
    }
    this.drawer.close();
    this.forest.plant(given);
  }
}

export function written(branch) {
  const turns = [...branch.past, ...branch.history].map((turn) => ({
    input: turn.input, messages: turn.messages, text: turn.text, reasoning: turn.reasoning,
    calls: turn.calls, usage: turn.usage, timing: turn.timing,
  }));
  return { format: FORMAT, version: VERSION, title: branch.title, system: branch.system, tools: branch.tools, turns };
}

// A file is checked before anything is made of it: it may come from anybody.
export function read(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    return { problem: `This is not JSON: ${error.message}` };
  }
  if (file?.format !== FORMAT || file.version !== VERSION) return { problem: "This is not a conversation of Holdfast." };
  const { tools, problem } = readTools(JSON.stringify(file.tools ?? []));
  if (problem) return { problem };
  if (!Array.isArray(file.turns)) return { problem: "The file has no turns." };
  if (file.turns.length > TURNS_MAX) return { problem: `The file has ${file.turns.length} turns, at most ${TURNS_MAX} can be shown.` };
  const place = file.turns.findIndex((turn) => !isTurn(turn));
  if (place >= 0) return { problem: `Turn ${place + 1} of the file is not a turn.` };
  const past = file.turns.map((turn) => ({
    ...newTurn(turn.input, {}, "after", turn.messages ?? null),
    text: turn.text, reasoning: turn.reasoning ?? "", state: "past",
    calls: (turn.calls ?? []).map(({ id, name, arguments: given, result }) => ({ id, name, arguments: given, result: result ?? null })),
  }));
  return { given: { tools, system: typeof file.system === "string" ? file.system : "", past }, problem: "" };
}

function isTurn(turn) {
  const isText = (value) => typeof value === "string";
  const isCall = (call) => isText(call?.id) && isText(call.name) && isText(call.arguments) && (call.result ?? "") + "" === (call.result ?? "");
  const isMessage = (message) => isText(message?.role) && isText(message.content);
  if (!isText(turn?.input) || !isText(turn.text) || !isText(turn.reasoning ?? "")) return false;
  if (!Array.isArray(turn.calls ?? []) || !(turn.calls ?? []).every(isCall)) return false;
  return (turn.messages ?? null) === null || (Array.isArray(turn.messages) && turn.messages.every(isMessage));
}
