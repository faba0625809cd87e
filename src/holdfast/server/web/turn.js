// One turn as the page knows it: a plain object, so that it can be stored and copied.

const LETTERS = "abcdefghijkmnpqrstuvwxyz23456789";

export const newName = (prefix) =>
  `${prefix}-${[...crypto.getRandomValues(new Uint8Array(10))].map((byte) => LETTERS[byte % 32]).join("")}`;

export function newTurn(input, settings, mode = "after", messages = null) {
  return {
    id: newName("t"), input, messages, settings, mode, text: "", reasoning: "", calls: [], heard: 0, settled: 0,
    shown: 0, state: "waiting", counts: false, usage: null, timing: null, problem: "", reason: "", notes: [],
  };
}

const newCall = (id, name) => ({ id, name, arguments: "", outcome: "", result: null });

// An event of a turn that speaks. Half a call is never kept: what counts as heard ends before it, until it is whole.
export function hearDelta(turn, message) {
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

// The end of a turn. `before` is how many turns the session had before it.
export function hearDone(turn, message, before) {
  const heard = turn.heard;
  turn.state = message.finish_reason === "abort" ? "cut" : "done";
  turn.counts = message.turns > before;
  if (turn.counts) stands(turn, message);
  else turn.problem = "Taken back: the session is as it was before.";
  turn.reason = message.finish_reason;
  turn.usage = message.usage;
  turn.timing = message.timing;
  turn.heard = turn.settled = turn.shown = message.usage.completion_tokens;
  return Math.max(0, heard - turn.heard);
}

// What remains of a turn: its text, its reasoning and its whole calls.
function stands(turn, message) {
  turn.text = message.text;
  turn.reasoning = message.reasoning ?? "";
  turn.calls = (message.tool_calls ?? []).map((call) => ({
    ...newCall(call.id, call.function.name), arguments: call.function.arguments, outcome: "complete",
  }));
}

// A turn as messages of a chat, for a session that has to be told what was said before.
export function asMessages(turn) {
  const said = turn.messages ?? [{ role: "user", content: turn.input }];
  const calls = turn.calls.map((call) => ({
    id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
  }));
  const answer = { role: "assistant", content: turn.text };
  return [...said, calls.length > 0 ? { ...answer, tool_calls: calls } : answer];
}
