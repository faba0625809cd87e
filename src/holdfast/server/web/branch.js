// One session as the page knows it: its turns, and the realtime connection that carries them. No drawing here.

import { Link } from "/web/server.js";

const LETTERS = "abcdefghijkmnpqrstuvwxyz23456789";
const newName = (prefix) =>
  `${prefix}-${[...crypto.getRandomValues(new Uint8Array(10))].map((byte) => LETTERS[byte % 32]).join("")}`;
const TTL_SECONDS = 1800;
const newCall = (id, name) => ({ id, name, arguments: "", outcome: "", result: null });

export class Branch extends EventTarget {
  constructor(server, { id = newName("s"), parent = null, turns = [], exists = false, tools = [] } = {}) {
    super();
    this.id = id;
    this.parent = parent;
    this.forkedAt = turns.length;
    this.turns = turns;
    this.exists = exists;
    this.tools = tools;
    this.opened = false;
    this.gone = "";
    this.seq = null;
    this.server = server;
    this.link = new Link(server, "/v1/realtime");
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

  // The turn whose calls wait for results: the last of the history, until another one has begun.
  get calling() {
    const last = this.turns.at(-1);
    return last && last.counts && last.calls.length > 0 && last.reason === "tool_calls" ? last : null;
  }

  changed(turn = null) {
    this.dispatchEvent(new CustomEvent("changed", { detail: turn }));
  }

  open() {
    const message = { type: "session.open", id: this.id };
    if (this.seq !== null) message.resume_after_seq = this.seq;
    else if (!this.exists) {
      message.ttl = TTL_SECONDS;
      if (this.tools.length > 0) message.tools = this.tools;
    }
    this.link.say(message);
  }

  dropped(code) {
    this.opened = false;
    if (code === 1008) this.gone = "Another page has taken this session over.";
    this.changed();
  }

  close() {
    this.link.say({ type: "session.close" });
    setTimeout(() => this.link.end(), 200);
  }

  // What the user says. `mode` is "after" or "interrupt", for when the model speaks.
  say(input, limit, mode = "after", messages = null) {
    const turn = {
      id: newName("t"), input, messages, limit, mode, text: "", reasoning: "", calls: [], heard: 0, settled: 0,
      shown: 0, state: "waiting", counts: false, usage: null, timing: null, problem: "",
    };
    this.turns.push(turn);
    if (this.opened) this.commit(turn);
    this.changed(turn);
    return turn;
  }

  // The result of a call. When every call of the turn has one, they are said together.
  giveResult(turn, call, result, limit) {
    call.result = result;
    const waiting = turn === this.calling && turn.calls.some((each) => each.result === null);
    if (turn !== this.calling || waiting) return this.changed(turn);
    const messages = turn.calls.map((each) => ({ role: "tool", tool_call_id: each.id, content: each.result }));
    this.say("", limit, "after", messages);
    this.changed(turn);
  }

  commit(turn) {
    this.link.say({ type: "input.append", ...(turn.messages ? { messages: turn.messages } : { text: turn.input }) });
    const sampling = { ...this.server.sampling, ...(turn.limit ? { max_tokens: turn.limit } : {}) };
    this.link.say({ type: "input.commit", turn_id: turn.id, mode: turn.mode, sampling });
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

  fork(turns) {
    this.link.say({ type: "session.fork", at_turn: turns, id: newName("s") });
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
      case "response.tool_call.done": if (turn) this.delta(turn, message); break;
      case "response.done": if (turn) this.done(turn, message); break;
      case "session.rewound": this.rewound(message, turn); break;
      case "session.forked": this.forked(message); return;
      case "session.closed": this.gone = "This session is closed."; this.opened = false; break;
      case "error": this.failed(turn, message.error); break;
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
  }

  // Half a call is never kept: what counts as heard ends before it, until it is whole.
  delta(turn, message) {
    turn.heard += message.token_ids.length;
    if (message.token_ids.length > 0) turn.settled = message.settled_tokens ?? turn.heard;
    switch (message.type) {
      case "response.delta": turn.text += message.text; break;
      case "response.reasoning.delta": turn.reasoning += message.text; break;
      case "response.tool_call": turn.calls.push(newCall(message.id, message.name)); break;
      case "response.tool_call.delta": turn.calls[message.index].arguments += message.arguments; break;
      case "response.tool_call.done": turn.calls[message.index].outcome = message.outcome; break;
    }
  }

  done(turn, message) {
    const before = this.history.length;
    turn.state = message.finish_reason === "abort" ? "cut" : "done";
    turn.counts = message.turns > before;
    if (turn.counts) this.stands(turn, message);
    else turn.problem = "Taken back: the session is as it was before.";
    turn.reason = message.finish_reason;
    turn.usage = message.usage;
    turn.timing = message.timing;
    turn.heard = turn.settled = turn.shown = message.usage.completion_tokens;
  }

  // What remains of a turn: its text, its reasoning and its whole calls.
  stands(turn, message) {
    turn.text = message.text;
    turn.reasoning = message.reasoning ?? "";
    turn.calls = (message.tool_calls ?? []).map((call) => ({
      ...newCall(call.id, call.function.name), arguments: call.function.arguments, outcome: "complete",
    }));
  }

  rewound(message, turn) {
    if (turn) {
      // It had ended by itself before the interruption came, and was cut all the same.
      Object.assign(turn, turn.cutAt, { state: "cut" });
      return;
    }
    const kept = this.history.slice(0, message.turns);
    this.turns = this.turns.filter((each) => kept.includes(each) || ["waiting", "speaking"].includes(each.state));
    this.forkedAt = Math.min(this.forkedAt, message.turns);
  }

  forked(message) {
    const turns = this.history.slice(0, message.turns).map((turn) => structuredClone(turn));
    const { server, tools } = this;
    const child = new Branch(server, { id: message.id, parent: this, turns, exists: true, tools });
    this.dispatchEvent(new CustomEvent("forked", { detail: child }));
  }

  failed(turn, error) {
    if (turn && turn.state !== "done") this.lose(turn, error.message);
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
