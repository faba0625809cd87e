// Who may hold memory, and how the page says it.

export const KINDS = ["free", "tree", "turn", "session", "checkpoint", "retiring", "transit", "quarantine",
  "copy"];

export const SAYS = {
  free: "free", tree: "shared prefixes", turn: "turns in flight", session: "sessions", checkpoint: "checkpoints",
  retiring: "being freed", transit: "on the move", quarantine: "quarantined",
  copy: "copies on the host",
};

// What a session that listens has heard of its next turn.
export function heardTokens({ heard, ahead }) {
  return `listening: ${heard} tokens heard, ${ahead} computed`;
}

// The tenant of a session's name as the server shows it: names of one's own have none.
export function tenantOf(session) {
  const place = session.indexOf("/");
  return place < 0 ? "this key" : session.slice(0, place);
}
