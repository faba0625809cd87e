// Puts the page together: views and tabs, the key, and whether the server is there.

import { Forest } from "/web/forest.js";
import { HealthView } from "/web/health.js";
import { MemoryView } from "/web/memory.js";
import { Link, Server } from "/web/server.js";
import { Talk } from "/web/talk.js";
import { Timeline } from "/web/timeline.js";

const server = new Server();
const forest = new Forest(server);
const talk = new Talk(forest);
const timeline = new Timeline(forest);
const live = new Link(server, "/v1/memory/live");
const memory = new MemoryView(live);
const health = new HealthView(server);

// --- tabs ---------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab, focus = false) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  timeline.draw();
  memory.layOut();
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

// --- whether the server is there ----------------------------------------------------------------------

const status = document.getElementById("status");
const offline = document.getElementById("offline");

function state(name, text, trouble = "") {
  status.dataset.state = name;
  status.textContent = text;
  offline.textContent = trouble;
  offline.hidden = !trouble;
}

live.onup = () => state("up", "Connected");
live.ondown = () => state("down", "Offline", "The server cannot be reached. Trying again…");
live.onmessage = (data) => {
  if (data instanceof ArrayBuffer) return memory.hear(data);
  const message = JSON.parse(data);
  if (message.type === "engine") {
    if (message.up) state("up", "Connected");
    else state("down", "Starting", "The engine is starting. Turns will be taken as soon as it is there.");
  }
  // An engine begins to show its memory: it can be asked for its model.
  if (message.type === "memory.pools") server.learn().catch(() => {});
  memory.hear(message);
  health.hear(message);
};

// --- the key ------------------------------------------------------------------------------------------

const dialog = document.getElementById("key-dialog");
let asked = false;

function askForKey() {
  state("down", "Locked");
  document.getElementById("key-wrong").hidden = !asked;
  asked = true;
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
document.getElementById("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  server.useKey(document.getElementById("key").value);
  if ((await server.obstacle()) === "key") {
    askForKey();
    return;
  }
  document.getElementById("key").value = "";
  asked = false;
  dialog.close();
  server.dispatchEvent(new Event("key"));
});
server.addEventListener("refused", askForKey);

async function enter() {
  await server.learn().catch(() => {});
  server.enter();
}

// What is said before the server lets the page in waits, like what is said while it is away.
live.start();
forest.plant();
const named = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
if (named) show(named);
else talk.said.focus();
if ((await server.obstacle()) === "key") {
  server.addEventListener("key", enter, { once: true });
  askForKey();
} else {
  enter();
}
