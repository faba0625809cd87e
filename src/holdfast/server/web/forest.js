// Every session that this page talks in, and which one is talked in now. They are kept for this tab of the browser,
// so that a reload finds them again.

import { Branch } from "/web/branch.js";

const KEY = "holdfast-sessions";
const SAVE_MS = 500;
const KEPT_MAX = 40;

export class Forest extends EventTarget {
  constructor(server) {
    super();
    this.server = server;
    this.branches = [];
    this.current = null;
    this.saving = null;
    addEventListener("pagehide", () => this.save());
  }

  // The sessions of before a reload; one of its own, without a past, where there are none.
  begin() {
    const kept = this.restored();
    for (const branch of kept.branches) this.hold(branch, this.branches.length);
    const current = this.branches.find((branch) => branch.id === kept.current) ?? this.branches.at(-1);
    if (!current) return this.plant();
    this.dispatchEvent(new Event("planted"));
    this.choose(current);
  }

  plant(given = {}) {
    const branch = new Branch(this.server, given);
    this.add(branch);
    return branch;
  }

  // Another session in the place of one that is gone: it is told what was said before with its first turn.
  replant(branch) {
    const { tools, system } = branch;
    const past = [...branch.past, ...branch.history].map((turn) => ({ ...structuredClone(turn), state: "past" }));
    const made = this.plant({ tools, system, past });
    this.remove(branch);
    return made;
  }

  add(branch, after = null) {
    this.hold(branch, after === null ? this.branches.length : this.branches.indexOf(after) + 1);
    this.dispatchEvent(new Event("planted"));
    this.choose(branch);
  }

  hold(branch, place) {
    this.branches.splice(place, 0, branch);
    branch.addEventListener("changed", (event) => {
      this.saveSoon();
      this.dispatchEvent(new CustomEvent("changed", { detail: { branch, turn: event.detail } }));
    });
    branch.addEventListener("noted", (event) => {
      this.dispatchEvent(new CustomEvent("noted", { detail: { branch, note: event.detail } }));
    });
    branch.addEventListener("forked", (event) => this.add(event.detail, branch));
  }

  // Close a session, on the server too. The page always has one to talk in.
  close(branch) {
    branch.close();
    this.remove(branch);
  }

  remove(branch) {
    const place = this.branches.indexOf(branch);
    this.branches.splice(place, 1);
    branch.link.end();
    if (this.branches.length === 0) return this.plant();
    if (this.current === branch) this.choose(this.branches[Math.min(place, this.branches.length - 1)]);
    else this.choose(this.current);
    this.dispatchEvent(new Event("planted"));
  }

  choose(branch, show = false) {
    this.current = branch;
    this.saveSoon();
    this.dispatchEvent(new CustomEvent("chosen", { detail: { show } }));
  }

  // The session `step` places further in the row.
  turn(step) {
    const { branches } = this;
    this.choose(branches[(branches.indexOf(this.current) + step + branches.length) % branches.length], true);
  }

  saveSoon() {
    this.saving ??= setTimeout(() => this.save(), SAVE_MS);
  }

  save() {
    clearTimeout(this.saving);
    this.saving = null;
    const shown = this.branches.slice(-KEPT_MAX).map((branch) => ({
      id: branch.id, parent: branch.parent?.id ?? null, forkedAt: branch.forkedAt, turns: branch.turns, past: branch.past,
      exists: branch.exists, tools: branch.tools, system: branch.system, seq: branch.seq, typed: branch.typed,
    }));
    // A browser gives a page some MiB: where they do not do, the oldest sessions are not kept.
    for (let from = 0; from <= shown.length; from++) {
      try {
        sessionStorage.setItem(KEY, JSON.stringify({ current: this.current?.id, branches: shown.slice(from) }));
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
      }
    }
  }

  restored() {
    let kept = null;
    try {
      kept = JSON.parse(sessionStorage.getItem(KEY));
    } catch {
      sessionStorage.removeItem(KEY);
    }
    const made = new Map();
    for (const each of kept?.branches ?? []) {
      made.set(each.id, new Branch(this.server, { ...each, parent: made.get(each.parent) ?? null }));
    }
    return { current: kept?.current, branches: [...made.values()] };
  }
}
