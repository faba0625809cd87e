// Small things that all views draw with. Values become attributes or text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// One of the symbols at the head of index.html.
export function icon(name) {
  return drawing("svg", { class: "icon", "aria-hidden": "true" }, drawing("use", { href: `#i-${name}` }));
}

export const find = (id) => document.getElementById(id);

// Text is written only where it differs: an unchanged node is neither laid out nor read aloud again.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
}

// A number in few characters: 950, 12.3k, 4.5M.
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Number.isInteger(value) || Math.abs(value) >= 100 ? String(Math.round(value)) : value.toFixed(1);
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Tokens a second while a turn spoke: between its first token and its last.
export function speed(turn) {
  if (!turn.usage || !turn.timing || turn.timing.ttft_ms === null) return null;
  const elapsed = turn.timing.total_ms - turn.timing.ttft_ms;
  return turn.usage.completion_tokens > 1 && elapsed > 0 ? ((turn.usage.completion_tokens - 1) / elapsed) * 1000 : null;
}

// The figures of a turn, a line for each kind.
export function figures({ turn }) {
  if (!turn.usage) return `${turn.heard} tokens so far`;
  const { cached_tokens: cached, computed_tokens: computed, completion_tokens: said } = turn.usage;
  const rate = speed(turn);
  const lines = [`${cached} tokens found in memory, ${computed} computed`, `${said} said${rate === null ? "" : `, ${short(rate)} a second`}`];
  return [...lines, `first token ${milliseconds(turn.timing.ttft_ms)}`].join("\n");
}

// Runs `draw` at most once a frame, however often it is asked for.
export function onceAFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

// Colours of the style sheet as numbers that a canvas stores. They are looked up once for each look.
const known = new Map();

export function colours(names, alpha = 255) {
  for (const name of names) if (!known.has(name)) known.set(name, resolved(name));
  return names.map((name) => ((alpha << 24) | known.get(name)) >>> 0);
}

export function forgetColours() {
  known.clear();
}

// A probe resolves a variable for the look in use.
function resolved(name) {
  const probe = element("i", { hidden: "" });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/\d+/g).map(Number);
  probe.remove();
  return (blue << 16) | (green << 8) | red;
}

// Runs `act` now, or behind a pause where it ran a moment ago.
export function atMostEvery(pause, act) {
  let ran = -Infinity;
  let waiting = null;
  return () => {
    if (waiting !== null) return;
    const left = ran + pause - performance.now();
    const run = () => {
      ran = performance.now();
      waiting = null;
      act();
    };
    if (left <= 0) run();
    else waiting = setTimeout(run, left);
  };
}

export async function copy(text, button = null) {
  await navigator.clipboard.writeText(text).catch(() => copyBySelection(text));
  if (!button) return;
  button.dataset.done = "yes";
  setTimeout(() => delete button.dataset.done, 1200);
}

// Pages without TLS on another machine have no clipboard: a selection does it there.
function copyBySelection(text) {
  const box = element("textarea", { class: "hidden", "aria-hidden": "true" });
  box.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}
