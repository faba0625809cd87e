// Puts the page together: views and tabs, keys, the live feed, and whether the server is there.

import { find, forgetColours, write } from "/web/draw.js";
import { Engines } from "/web/engines.js";
import { Forest } from "/web/forest.js";
import { Glance } from "/web/glance.js";
import { HealthView } from "/web/health.js";
import { Keys } from "/web/keys.js";
import { MemoryView } from "/web/memory.js";
import { MemoryModel } from "/web/memory-model.js";
import { Recorder } from "/web/recorder.js";
import { Scrubber } from "/web/scrub.js";
import { Link, Server } from "/web/server.js";
import { SessionRow } from "/web/session-row.js";
import { Settings } from "/web/settings.js";
import { Talk } from "/web/talk.js";
import { Timeline } from "/web/timeline.js";
import { Transfer } from "/web/transfer.js";
import { Watch } from "/web/watch.js";

const server = new Server();
const forest = new Forest(server);
const settings = new Settings(server);
const row = new SessionRow(forest);
const talk = new Talk(forest, settings);
const timeline = new Timeline(forest);
const transfer = new Transfer(forest, settings.drawer);
const live = new Link(server, "/v1/memory/live");
const model = new MemoryModel();
const recorder = new Recorder();
const memory = new MemoryView(model, (session) => live.say({ type: "look", session }));
const scrubber = new Scrubber(recorder, model, memory);
const health = new HealthView(server);
const glance = new Glance(forest, model);
const watch = new Watch();
const engines = new Engines(server, (text) => watch.tell(text));

// --- views --------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("#tabs [role=tab]")];

function show(tab, focus = false) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    find(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  find("tip").hidden = true;
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  timeline.draw();
  memory.layOut();
  health.draw();
  engines.draw();
  glance.draw();
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) show(tabs[(place + step + tabs.length) % tabs.length], true);
  });
}

forest.addEventListener("chosen", (event) => {
  if (event.detail.show) {
    show(tabs[0]);
    talk.said.focus();
  }
});
forest.addEventListener("noted", (event) => watch.tell(event.detail.note));
find("fresh").addEventListener("click", () => talk.begin());
find("settings-begin").addEventListener("click", () => {
  if (settings.session() === null) return;
  settings.drawer.close();
  talk.begin();
});

// --- the look -----------------------------------------------------------------------------------------

const LOOKS = ["system", "dark", "light"];

function changeLook(step) {
  const root = document.documentElement;
  const now = LOOKS[(LOOKS.indexOf(root.dataset.look ?? "system") + step) % LOOKS.length];
  if (now === "system") delete root.dataset.look;
  else root.dataset.look = now;
  localStorage.setItem("holdfast-look", now);
  find("look").setAttribute("aria-label", `Look: ${now === "system" ? "as the system" : now}`);
  repaint();
}

// Canvases do not follow the style sheet by themselves.
function repaint() {
  forgetColours();
  memory.draw();
  scrubber.drawStrip();
  glance.draw();
}

find("look").addEventListener("click", () => changeLook(1));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// --- keys ---------------------------------------------------------------------------------------------

const keys = {
  stop: () => talk.interrupt(),
  KeyR: () => talk.regenerateLast(),
  KeyC: () => talk.copyLast(),
  KeyF: () => forest.current.fork(forest.current.history.length),
  KeyN: () => talk.begin(),
  KeyW: () => forest.close(forest.current),
  Comma: () => forest.turn(-1),
  Period: () => forest.turn(1),
  KeyS: () => settings.open(),
  KeyE: () => transfer.save(),
  KeyI: () => transfer.ask(),
  KeyL: () => changeLook(1),
};
tabs.forEach((tab, place) => (keys[`Digit${place + 1}`] = () => show(tab, true)));
new Keys(keys);

// --- the live feed, and whether the server is there ---------------------------------------------------

const status = find("status");
const offline = find("offline");

function state(name, text, trouble = "") {
  status.dataset.state = name;
  write(status, text);
  write(offline, trouble);
  offline.hidden = !trouble;
}

live.onup = () => state("up", "Connected");
live.ondown = () => state("down", "Offline", "The server cannot be reached. Trying again…");
live.onmessage = (data) => {
  if (data instanceof ArrayBuffer) return changedUnits("apply", data);
  const message = JSON.parse(data);
  if (message.type === "engine") {
    if (message.up) state("up", "Connected");
    else state("down", "Starting", "The engine is starting. Turns will be taken as soon as it is there.");
  } else if (message.type === "memory.pools") begin(message.pools);
  else if (message.type === "memory.holders") changedUnits("name", message);
  else if (message.type === "memory.leased") memory.hearLeased(message);
  else if (message.type === "memory.report") report(message);
  else if (message.type === "health") glance.hearHealth(message);
  health.hear(message);
};

// An engine begins to show its memory: it can be asked for its model.
function begin(pools) {
  server.learn().then(() => write(find("model"), server.model), () => {});
  model.begin(pools);
  recorder.clear();
  scrubber.clear();
  watch.clear();
  memory.begin();
}

function changedUnits(kind, message) {
  model[kind](message);
  recorder.note(kind, message, model, performance.now() / 1000);
  if (memory.model === model) memory.draw();
  glance.drawSoon();
}

function report(message) {
  memory.report = message;
  engines.hear(message);
  talk.hear(message);
  const census = model.census();
  watch.look(census.sessions);
  scrubber.note(census.tiers);
  glance.hearCensus(census);
  memory.draw();
}

// --- the key ------------------------------------------------------------------------------------------

const dialog = find("key-dialog");
let asked = false;

function askForKey() {
  state("down", "Locked");
  find("key-wrong").hidden = !asked;
  asked = true;
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  server.useKey(find("key").value);
  if ((await server.obstacle()) === "key") {
    askForKey();
    return;
  }
  find("key").value = "";
  asked = false;
  dialog.close();
  server.dispatchEvent(new Event("key"));
});
server.addEventListener("refused", askForKey);

async function enter() {
  await server.learn().catch(() => {});
  write(find("model"), server.model);
  server.enter();
}

// What is said before the server lets the page in waits, like what is said while it is away.
live.start();
forest.begin();
row.draw();
changeLook(0);
const named = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
if (named) show(named);
else talk.said.focus();
if ((await server.obstacle()) === "key") {
  server.addEventListener("key", enter, { once: true });
  askForKey();
} else {
  enter();
}
