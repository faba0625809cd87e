// One session as the page knows it: its turns, and the realtime connection that carries them. No drawing here.

import { Draft } from "/web/draft.js";
import { Link } from "/web/server.js";
import { asMessages, hearDelta, hearDone, newName, newTurn } from "/web/turn.js";

const TTL_SECONDS = 1800;
const PASSING = ["draining", "engine_unavailable", "engine_lost", "engine_draining", "session_moved"];
const AGAIN_MS = 1000;
const OPEN_STATES = ["waiting", "speaking"];

export class Branch extends EventTarget {
  // `past`: turns that the page knows and the session does not, told to it with its first turn.
  constructor(server, given = {}) {
    super();
    const { id = newName("s"), parent = null, turns = [], past = [], exists = false, tools = [], system = "" } = given;
    this.id = id;
    this.parent = parent;
    this.forkedAt = given.forkedAt ?? turns.length;
    this.turns = turns;
    this.past = past;
    this.exists = exists;
    this.tools = tools;
    this.system = system;
    this.typed = given.typed ?? "";
    this.seq = given.seq ?? null;
    this.opened = false;
    this.gone = "";
    this.problem = "";
    this.ahead = null;
    this.children = new Map();
    this.server = server;
    this.link = new Link(server, "/v1/realtime");
    this.draft = new Draft(this.link);
    this.link.onup = () => this.open();
    this.link.ondown = (code) => this.dropped(code);
    this.link.onmessage = (text) => this.hear(JSON.parse(text));
    this.link.start();
  }

  get speaking() {
    return this.turns.find((turn) => turn.state === "speaking") ?? null;
  }

  // Turns that are part of the session's history.
  get history() {
    return this.turns.filter((turn) => turn.counts);
  }

  get title() {
    const inputs = (turns) => turns.map((turn) => turn.input.trim()).find(Boolean);
    // A fork is named after what is its own.
    const own = this.parent ? inputs(this.turns.slice(this.forkedAt)) : null;
    const said = own ?? inputs([...this.past, ...this.turns]);
    return said ? said.replace(/\s+/g, " ").slice(0, 48) : "New session";
  }

  // The turn whose calls wait for results: the last of the history, until another one has begun.
  get calling() {
    const last = this.turns.at(-1);
    return last && last.counts && last.calls.length > 0 && last.reason === "tool_calls" ? last : null;
  }

  changed(turn = null) {
    this.dispatchEvent(new CustomEvent("changed", { detail: turn }));
  }

  open() {
    this.draft.clear();
    const message = { type: "session.open", id: this.id };
    if (this.seq !== null) message.resume_after_seq = this.seq;
    else if (!this.exists) {
      message.ttl = TTL_SECONDS;
      if (this.tools.length > 0) message.tools = this.tools;
      if (this.system) message.system = this.system;
    }
    this.link.say(message);
  }

  dropped(code) {
    this.opened = false;
    this.ahead = null;
    if (code === 1008) this.gone = "Another page has taken this session over.";
    this.changed();
  }

  close() {
    this.link.say({ type: "session.close" });
    setTimeout(() => this.link.end(), 200);
  }

  // What is in the box: it is kept with the session, and computed ahead if `listens`.
  type(text, listens) {
    this.typed = text;
    if (this.opened && !this.gone) this.draft.type(listens ? text.trimStart() : "");
  }

  // What the user says. `mode` is "after" or "interrupt", for when the model speaks.
  say(input, settings, mode = "after", messages = null) {
    const turn = newTurn(input, settings, mode, messages);
    this.turns.push(turn);
    if (this.opened) this.commit(turn);
    this.changed(turn);
    return turn;
  }

  // The result of a call. When every call of the turn has one, they are said together.
  giveResult(turn, call, result, settings) {
    call.result = result;
    const waiting = turn === this.calling && turn.calls.some((each) => each.result === null);
    if (turn !== this.calling || waiting) return this.changed(turn);
    const messages = turn.calls.map((each) => ({ role: "tool", tool_call_id: each.id, content: each.result }));
    this.say("", settings, "after", messages);
    this.changed(turn);
  }

  commit(turn) {
    const first = this.past.length > 0 && !this.turns.some((each) => each !== turn && (each.counts || OPEN_STATES.includes(each.state)));
    const said = turn.messages ?? [{ role: "user", content: turn.input }];
    const messages = first ? [...this.past.flatMap(asMessages), ...said] : turn.messages;
    this.draft.become(messages ? "" : turn.input);
    if (messages) this.link.say({ type: "input.append", messages });
    this.draft.clear();
    const { thinking, ...given } = turn.settings ?? {};
    const commit = { type: "input.commit", turn_id: turn.id, mode: turn.mode, on_abort: "keep" };
    if (thinking !== undefined) commit.thinking = thinking;
    this.link.say({ ...commit, sampling: { ...this.server.sampling, ...given } });
  }

  // Cut the model off at the word last shown: what has not been shown is as if it had never been said.
  interrupt() {
    const turn = this.speaking;
    if (!turn) return;
    turn.cutAt = { text: turn.drawn ?? "", shown: turn.shown, calls: turn.calls.filter((call) => call.outcome) };
    this.link.say({ type: "response.interrupt", turn_id: turn.id, keep_tokens: turn.shown });
  }

  rewind(turns) {
    this.link.say({ type: "session.rewind", to_turn: turns });
  }

  // A second session from a turn on; `begun` is called with it.
  fork(turns, begun = () => {}) {
    const id = newName("s");
    this.children.set(id, begun);
    this.link.say({ type: "session.fork", at_turn: turns, id });
  }

  // The same words again: the answer is taken back, and another one asked for.
  regenerate(turn) {
    const place = this.history.indexOf(turn);
    if (place < 0 || this.speaking || !this.opened) return;
    this.rewind(place);
    this.say(turn.input, turn.settings, "after", turn.messages);
  }

  // Other words in the place of a turn's: a fork from the turn before it.
  edit(turn, input, settings) {
    const place = this.history.indexOf(turn);
    if (place < 0) return;
    this.fork(place, (child) => child.say(input, settings));
  }

  hear(message) {
    if (message.seq !== null && message.type !== "session.opened") this.seq = message.seq;
    const turn = this.turns.find((each) => each.id === message.turn_id) ?? null;
    switch (message.type) {
      case "session.opened": this.wasOpened(message); break;
      case "response.started": if (turn) turn.state = "speaking"; break;
      case "response.delta":
      case "response.reasoning.delta":
      case "response.tool_call":
      case "response.tool_call.delta":
      case "response.tool_call.done": if (turn) hearDelta(turn, message); break;
      case "response.done": if (turn) this.done(turn, message); break;
      case "session.rewound": this.rewound(message, turn); break;
      case "session.forked": this.forked(message); return;
      case "session.closed": this.gone = "This session is closed."; this.opened = false; break;
      case "error": this.failed(turn, message); break;
    }
    this.changed(turn);
  }

  wasOpened(message) {
    this.opened = true;
    this.exists = true;
    this.gone = "";
    if (this.seq === null || !message.resumed) {
      this.seq = message.seq;
      for (const turn of this.turns) {
        if (turn.state === "speaking") this.lose(turn, "The connection broke.");
      }
    }
    // What was said and not begun when the connection broke is said again; its id makes it count once.
    for (const turn of this.turns) if (turn.state === "waiting") this.commit(turn);
    if (this.typed) this.draft.type(this.typed.trimStart());
  }

  done(turn, message) {
    const cut = hearDone(turn, message, this.history.filter((each) => each !== turn).length);
    if (turn.state === "cut" && turn.counts) this.note(turn, `Cut after ${turn.heard} tokens; ${cut} rolled back`);
  }

  // A note on what happened to the session, with how much of what remains must be computed again.
  async note(turn, what) {
    const answer = await this.server.call("GET", `/v1/sessions/${encodeURIComponent(this.id)}`).catch(() => null);
    let again = "";
    if (answer?.ok) {
      const { tokens } = await answer.json();
      // The last token that was said is never computed before the next turn.
      const left = Math.max(0, tokens.known - tokens.computed - (tokens.known > 0 ? 1 : 0));
      again = `, ${left} to recompute`;
    }
    const note = `${what}${again}.`;
    if (turn) turn.notes.push(note);
    this.dispatchEvent(new CustomEvent("noted", { detail: note }));
    this.changed(turn);
  }

  rewound(message, turn) {
    if (turn) {
      // It had ended by itself before the interruption came, and was cut all the same.
      const cut = turn.heard - turn.cutAt.shown;
      Object.assign(turn, turn.cutAt, { state: "cut", heard: turn.cutAt.shown });
      this.note(turn, `Cut after ${turn.heard} tokens; ${cut} rolled back`);
      return;
    }
    const kept = this.history.slice(0, message.turns);
    const lost = this.history.slice(message.turns);
    const tokens = (each) => (each.usage ? each.usage.prompt_tokens + each.usage.completion_tokens : 0);
    const rolled = lost.length > 0 ? tokens(lost.at(-1)) - (kept.length > 0 ? tokens(kept.at(-1)) : 0) : 0;
    this.turns = this.turns.filter((each) => kept.includes(each) || OPEN_STATES.includes(each.state));
    this.forkedAt = Math.min(this.forkedAt, message.turns);
    if (lost.length > 0) this.note(kept.at(-1) ?? null, `Went back to turn ${message.turns}; ${rolled} tokens rolled back`);
  }

  forked(message) {
    const turns = this.history.slice(0, message.turns).map((turn) => structuredClone(turn));
    const { server, tools, system } = this;
    const past = structuredClone(this.past);
    const child = new Branch(server, { id: message.id, parent: this, turns, past, exists: true, tools, system });
    this.dispatchEvent(new CustomEvent("forked", { detail: child }));
    const shared = message.tokens.known;
    child.note(turns.at(-1) ?? null, `Forked from ${this.id} at turn ${message.turns}; ${shared} tokens shared`);
    this.children.get(message.id)?.(child);
    this.children.delete(message.id);
  }

  // What is refused because the server ends or begins is tried again: a turn's id makes it count once.
  failed(turn, { error }) {
    const passing = PASSING.includes(error.code);
    if (turn?.state === "waiting" && passing) setTimeout(() => this.opened && turn.state === "waiting" && this.commit(turn), AGAIN_MS);
    else if (!turn && !this.opened && passing) setTimeout(() => this.opened || this.open(), AGAIN_MS);
    else if (turn && turn.state !== "done") this.lose(turn, error.message);
    else if (error.code === "session_exists" && !this.exists) {
      this.exists = true; // The answer to the first opening was lost.
      this.open();
    } else if (!this.opened) this.gone = error.message;
    else this.problem = error.message;
  }

  lose(turn, why) {
    turn.state = "failed";
    turn.counts = false;
    turn.problem = why;
  }
}
