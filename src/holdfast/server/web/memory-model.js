// The memory as the live feed tells it: for each unit of each pool the number of its holder, and who the numbers are.
// No drawing here.

import { KINDS } from "/web/holders.js";

export class MemoryModel {
  constructor() {
    this.pools = [];
    this.holders = new Map();
    this.step = 0;
  }

  begin(pools) {
    this.pools = pools.map((pool) => ({ ...pool, cells: new Uint16Array(pool.units) }));
    this.holders = new Map();
  }

  name({ come, gone }) {
    for (const number of gone) this.holders.delete(number);
    for (const [number, kind, session, turn] of come) this.holders.set(number, { kind, session, turn });
  }

  // Differences come as runs of numbers: the step, then pools with their runs.
  apply(buffer) {
    const numbers = new Uint32Array(buffer);
    this.step = numbers[0];
    for (let place = 1; place < numbers.length; ) {
      const pool = this.pools[numbers[place]];
      const end = place + 2 + numbers[place + 1] * 3;
      for (place += 2; place < end; place += 3) {
        pool.cells.fill(numbers[place + 2], numbers[place], numbers[place] + numbers[place + 1]);
      }
    }
  }

  kindOf(number) {
    return number < KINDS.length ? number : (this.holders.get(number)?.kind ?? 0);
  }

  sessionOf(number) {
    return this.holders.get(number)?.session || null;
  }

  get highest() {
    let highest = KINDS.length - 1;
    for (const number of this.holders.keys()) if (number > highest) highest = number;
    return highest;
  }

  // How many units of a pool each holder has, by number.
  count(pool) {
    const counts = new Uint32Array(1 << 16);
    const { cells } = pool;
    for (let unit = 0; unit < cells.length; unit++) counts[cells[unit]]++;
    return counts;
  }

  // What each session holds on each tier, and the units of each kind on each tier that has any.
  census() {
    const sessions = new Map();
    const tiers = new Map();
    for (const pool of this.pools.filter((each) => each.units > 0)) {
      const counts = this.count(pool);
      if (!tiers.has(pool.tier)) tiers.set(pool.tier, KINDS.map(() => 0));
      const kinds = tiers.get(pool.tier);
      for (let number = 0; number <= this.highest; number++) {
        if (!counts[number]) continue;
        kinds[this.kindOf(number)] += counts[number];
        const session = this.sessionOf(number);
        if (!session) continue;
        if (!sessions.has(session)) sessions.set(session, { device: 0, host: 0, disk: 0 });
        sessions.get(session)[pool.tier] += counts[number];
      }
    }
    return { sessions, tiers };
  }

  copy() {
    const made = new MemoryModel();
    made.pools = this.pools.map((pool) => ({ ...pool, cells: pool.cells.slice() }));
    made.holders = new Map(this.holders);
    made.step = this.step;
    return made;
  }
}
