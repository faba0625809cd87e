// Draws a described tree, and changes only what differs from the tree before. So an answer that grows does not
// flicker, and what a reader has selected stays selected. A description is a string, or {tag, attributes, children}.

const ALLOWED = new Set(["class", "href", "rel", "target", "start", "data-language", "data-copy", "aria-label", "type", "tabindex", "scope"]);

export function node(tag, attributes = {}, ...children) {
  return { tag, attributes, children: children.flat() };
}

// The children of `parent` from place `from` on become `wanted`; those before it are left alone.
export function patch(parent, wanted, from = 0) {
  let place = from;
  for (const one of joined(wanted)) {
    const there = parent.childNodes[place] ?? null;
    if (there && fits(there, one)) update(there, one);
    else if (there) parent.replaceChild(make(one), there);
    else parent.appendChild(make(one));
    place++;
  }
  while (parent.childNodes.length > place) parent.lastChild.remove();
}

// Texts side by side are one text: a browser cannot tell them apart either.
function joined(wanted) {
  const whole = [];
  for (const one of wanted) {
    if (typeof one === "string" && typeof whole.at(-1) === "string") whole[whole.length - 1] += one;
    else if (one !== "") whole.push(one);
  }
  return whole;
}

function fits(there, one) {
  if (typeof one === "string") return there.nodeType === Node.TEXT_NODE;
  return there.nodeType === Node.ELEMENT_NODE && there.localName === one.tag;
}

function update(there, one) {
  if (typeof one === "string") return grow(there, one);
  for (const name of there.getAttributeNames()) {
    if (!(name in one.attributes)) there.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(one.attributes)) {
    if (there.getAttribute(name) !== String(value)) set(there, name, value);
  }
  patch(there, one.children);
}

function make(one) {
  if (typeof one === "string") return document.createTextNode(one);
  const made = document.createElement(one.tag);
  for (const [name, value] of Object.entries(one.attributes)) set(made, name, value);
  patch(made, one.children);
  return made;
}

function set(made, name, value) {
  if (!ALLOWED.has(name)) throw new Error(`attribute ${name} is not allowed`);
  made.setAttribute(name, value);
}

// A text that only became longer is appended to.
export function grow(text, wanted) {
  if (text.data === wanted) return;
  if (wanted.startsWith(text.data)) text.appendData(wanted.slice(text.data.length));
  else text.data = wanted;
}
