// How the server does: throughput, latency, the audit and its findings, and the storm.

import { element, milliseconds } from "/web/draw.js";

const ROWS = { first_token: "First token", between_tokens: "Between tokens", turn: "Whole turn", queue: "In the queue" };

export class HealthView {
  constructor(server) {
    this.server = server;
    this.health = null;
    this.report = null;
    document.getElementById("storm-button").addEventListener("click", () => this.toggleStorm());
  }

  hear(message) {
    if (message.type === "health") this.health = message;
    else if (message.type === "memory.report") this.report = message;
    else return;
    this.draw();
  }

  draw() {
    const { health, report } = this;
    document.getElementById("no-figures").hidden = health !== null;
    document.getElementById("latency").hidden = health === null;
    if (health) this.drawFigures(health);
    if (report) this.drawAudit(report);
  }

  drawFigures({ rates, latency, running, queued, sessions, restarts, storm }) {
    const card = (value, label) => element("div", { class: "card" }, element("b", {}, String(value)), element("span", {}, label));
    const rate = (name) => Math.round(rates[name] ?? 0);
    document.getElementById("cards").replaceChildren(
      card(rate("generated_tokens"), "tokens said a second"),
      card(rate("computed_tokens"), "tokens computed a second"),
      card(rate("cached_tokens"), "tokens found in memory a second"),
      card(running, "turns running"),
      card(queued, "turns waiting"),
      card(sessions, "sessions open"),
      card(restarts, "engine restarts"),
    );
    const rows = Object.entries(ROWS).map(([name, label]) => {
      const figures = latency[name] ?? {};
      const cells = ["p50", "p95", "p99"].map((part) => element("td", {}, milliseconds(figures[part])));
      return element("tr", {}, element("th", { scope: "row" }, label), ...cells, element("td", {}, String(figures.count ?? 0)));
    });
    document.querySelector("#latency tbody").replaceChildren(...rows);
    this.drawStorm(storm);
  }

  drawAudit({ audit, findings, step }) {
    const state = findings.length ? `${findings.length} findings` : "No findings";
    document.getElementById("audit").textContent =
      `${state}. Mode ${audit.mode}; step ${step}, last full recount at step ${audit.last_full_census_step}.`;
    const items = findings.map((finding) => {
      const item = element("li", {}, `${finding.kind} at step ${finding.step}: ${finding.holder} ${finding.detail}`);
      if (finding.trail?.length) item.append(element("pre", { tabindex: "0" }, finding.trail.join("\n")));
      return item;
    });
    document.getElementById("findings").replaceChildren(...items);
  }

  drawStorm(storm) {
    document.getElementById("storm").hidden = !storm.allowed;
    document.getElementById("storm-button").textContent = storm.running ? "End the storm" : "Start a storm";
    this.raging = storm.running;
    const left = storm.running ? `${Math.ceil(storm.seconds_left)} s left` : "Calm";
    document.getElementById("storm-state").textContent =
      storm.turns ? `${left} · ${storm.turns} turns, ${storm.interrupts} interrupted, ${storm.refused} refused` : left;
  }

  async toggleStorm() {
    const answer = await this.server.call(this.raging ? "DELETE" : "POST", "/v1/storm", this.raging ? undefined : {});
    if (answer.ok) this.drawStorm(await answer.json());
  }
}
