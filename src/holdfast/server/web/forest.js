// Every session that this page talks in, and which one is talked in now.

import { Branch } from "/web/branch.js";

export class Forest extends EventTarget {
  constructor(server) {
    super();
    this.server = server;
    this.branches = [];
    this.current = null;
  }

  // A session of its own, without a past.
  plant(tools = []) {
    this.add(new Branch(this.server, { tools }));
  }

  add(branch, after = null) {
    const place = after === null ? this.branches.length : this.branches.indexOf(after) + 1;
    this.branches.splice(place, 0, branch);
    branch.addEventListener("changed", (event) => {
      this.dispatchEvent(new CustomEvent("changed", { detail: { branch, turn: event.detail } }));
    });
    branch.addEventListener("forked", (event) => this.add(event.detail, branch));
    this.dispatchEvent(new Event("planted"));
    this.choose(branch);
  }

  choose(branch, show = false) {
    this.current = branch;
    this.dispatchEvent(new CustomEvent("chosen", { detail: { show } }));
  }
}
