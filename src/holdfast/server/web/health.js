// How the server does: figures now and over five minutes, latency, the audit and its findings, and the storm.

import { element, find, milliseconds, short, write } from "/web/draw.js";
import { History } from "/web/history.js";
import { Plot } from "/web/plot.js";

const ROWS = { first_token: "First token", between_tokens: "Between tokens", turn: "Whole turn", queue: "In the queue" };
const CARDS = {
  generated_tokens: "tokens said a second", computed_tokens: "tokens computed a second", cached_tokens: "tokens found in memory a second",
  running: "turns running", queued: "turns waiting", sessions: "sessions open", restarts: "engine restarts",
};
const percent = (value) => (value === null ? "–" : `${Math.round(value)} %`);
const PERCENTILES = [["p50", "c1", "median"], ["p95", "c2", "95 %"], ["p99", "c3", "99 %"]];

export class HealthView {
  constructor(server) {
    this.server = server;
    this.report = null;
    this.known = false;
    this.speculates = false;
    this.figures = new History();
    this.memory = new History();
    find("storm-button").addEventListener("click", () => this.toggleStorm());
    this.cards = Object.entries(CARDS).map(([name, label]) => ({ name, value: element("b", {}, "0"), label }));
    this.latency = Object.entries(ROWS).map(([name, label]) => {
      const cells = [0, 1, 2, 3].map(() => element("td"));
      return { name, cells, row: element("tr", {}, element("th", { scope: "row" }, label), ...cells) };
    });
    document.querySelector("#latency tbody").replaceChildren(...this.latency.map((each) => each.row));
    this.plots = {
      rate: new Plot("Throughput", "tokens a second", [["said", "c1", "said"], ["computed", "c2", "computed"]]),
      hits: new Plot("Prompts found in memory", "", [["hits", "c1", "hits"]], { ceiling: 100, say: percent }),
      drafts: new Plot("Drafts accepted", "", [["drafts", "c1", "accepted"]], { ceiling: 100, say: percent }),
      first: new Plot("Time to first token", "", PERCENTILES.map(([name, ...rest]) => [`first_${name}`, ...rest]), { say: milliseconds }),
      between: new Plot("Time between tokens", "", PERCENTILES.map(([name, ...rest]) => [`between_${name}`, ...rest]), { say: milliseconds }),
      turns: new Plot("Turns", "", [["running", "c1", "running"], ["queued", "c2", "waiting"]]),
      moves: new Plot("Memory given up", "a second", [["spills", "c1", "spilled"], ["dropped", "c2", "dropped"], ["retracts", "c3", "preempted"]]),
      tiers: new Plot("Memory in use", "", [["device", "c1", "device"], ["host", "c2", "host"], ["disk", "c3", "disk"]], { ceiling: 100, say: percent }),
      audit: new Plot("Audit", "findings", [["findings", "c4", "findings"]]),
    };
    find("plots").append(...Object.values(this.plots).map((plot) => plot.whole));
    this.showPlots();
  }

  get hidden() {
    return find("health").hidden;
  }

  hear(message) {
    if (message.type === "health") this.heardFigures(message);
    else if (message.type === "memory.report") this.heardReport(message);
    else return;
    if (!this.hidden) this.draw();
  }

  heardFigures(message) {
    const { rates, latency, running, queued } = message;
    if (!this.known) find("cards").replaceChildren(...this.cards.map(({ value, label }) => element("div", { class: "card" }, value, element("span", {}, label))));
    this.known = true;
    this.health = message;
    const { cached_tokens: cached = 0, computed_tokens: computed = 0, drafted_tokens: drafted = 0, accepted_tokens: accepted = 0 } = rates;
    this.speculates ||= drafted > 0;
    const values = {
      said: rates.generated_tokens ?? 0, computed, running, queued, spills: rates.spills ?? 0, dropped: rates.dropped ?? 0, retracts: rates.retracts ?? 0,
      hits: cached + computed > 0 ? (100 * cached) / (cached + computed) : null,
      drafts: drafted > 0 ? (100 * accepted) / drafted : null,
    };
    for (const [part] of PERCENTILES) {
      values[`first_${part}`] = latency.first_token?.[part] ?? null;
      values[`between_${part}`] = latency.between_tokens?.[part] ?? null;
    }
    this.figures.add(values);
  }

  heardReport(report) {
    this.report = report;
    const used = {};
    for (const { tier, units, holders } of report.pools) {
      const sum = (used[tier] ??= { units: 0, held: 0 });
      sum.units += units;
      sum.held += units - holders.FREE;
    }
    const shares = Object.entries(used).map(([tier, { units, held }]) => [tier, units > 0 ? (100 * held) / units : null]);
    this.memory.add({ ...Object.fromEntries(shares), findings: report.findings.length });
  }

  draw() {
    find("no-figures").hidden = this.known;
    find("latency").hidden = !this.known;
    this.showPlots();
    if (this.known) this.drawFigures(this.health);
    if (this.report) this.drawAudit(this.report);
  }

  showPlots() {
    const { tiers, audit, ...figures } = this.plots;
    for (const plot of Object.values(figures)) {
      plot.whole.hidden = !this.known;
      plot.show(this.figures.points, this.figures.span);
    }
    figures.drafts.whole.hidden = !this.speculates;
    for (const plot of [tiers, audit]) plot.show(this.memory.points, this.memory.span);
  }

  drawFigures(health) {
    for (const { name, value } of this.cards) write(value, short(Math.round(health.rates[name] ?? health[name] ?? 0)));
    for (const { name, cells } of this.latency) {
      const figures = health.latency[name] ?? {};
      ["p50", "p95", "p99"].forEach((part, place) => write(cells[place], milliseconds(figures[part])));
      write(cells[3], String(figures.count ?? 0));
    }
    this.drawStorm(health.storm);
  }

  drawAudit({ audit, findings, step }) {
    const state = findings.length ? `${findings.length} findings` : "No findings";
    write(find("audit"), `${state}. Mode ${audit.mode}; step ${step}, last full recount at step ${audit.last_full_census_step}.`);
    const items = findings.map((finding) => {
      const item = element("li", {}, `${finding.kind} at step ${finding.step}: ${finding.holder} ${finding.detail}`);
      if (finding.trail?.length) item.append(element("pre", { tabindex: "0" }, finding.trail.join("\n")));
      return item;
    });
    find("findings").replaceChildren(...items);
  }

  drawStorm(storm) {
    find("storm").hidden = !storm.allowed;
    write(find("storm-button"), storm.running ? "End the storm" : "Start a storm");
    this.raging = storm.running;
    const left = storm.running ? `${Math.ceil(storm.seconds_left)} s left` : "Calm";
    write(find("storm-state"), storm.turns ? `${left} · ${storm.turns} turns, ${storm.interrupts} interrupted, ${storm.refused} refused` : left);
  }

  async toggleStorm() {
    const answer = await this.server.call(this.raging ? "DELETE" : "POST", "/v1/storm", this.raging ? undefined : {});
    if (answer.ok) this.drawStorm(await answer.json());
  }
}
