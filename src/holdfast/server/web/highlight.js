// Code in colours: comments, strings, numbers, keywords and names that are called. One expression for each family of
// languages reads the text once, from its beginning to its end.

import { node } from "/web/patch.js";

const LONGEST = 20_000;

const WORDS = {
  python: "and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self",
  script: "as async await break case catch class const continue debugger default delete do else enum export extends finally for from function if implements import in instanceof interface let new of return static super switch this throw try type typeof var void while with yield null true false undefined",
  systems: "as async await auto bool break case catch char class const constexpr continue crate default defer delete do double else enum extern float fn for func go goto if impl import in inline int interface let long loop map match mod move mut namespace new nil package private protected pub public range ref return self short signed sizeof static string struct super switch template this throw trait true false null try type typedef union unsafe unsigned use using var virtual void volatile where while chan select fallthrough final abstract extends implements import",
  shell: "if then else elif fi for while do done case esac in function return export local set unset echo cd exit source alias sudo",
  query: "select from where and or not insert into values update set delete create table index view drop alter add primary key foreign references join left right inner outer on group by order having limit offset as distinct union all null is in like between exists case when then else end count sum avg min max begin commit rollback with",
  data: "true false null",
};

const FAMILIES = {
  python: "python", py: "python", python3: "python",
  javascript: "script", js: "script", jsx: "script", typescript: "script", ts: "script", tsx: "script", mjs: "script",
  c: "systems", cpp: "systems", "c++": "systems", h: "systems", cs: "systems", csharp: "systems", java: "systems",
  go: "systems", rust: "systems", rs: "systems", kotlin: "systems", swift: "systems", zig: "systems", cuda: "systems",
  sh: "shell", bash: "shell", shell: "shell", zsh: "shell", console: "shell", makefile: "shell", dockerfile: "shell",
  sql: "query", json: "data", yaml: "data", yml: "data", toml: "data", css: "data",
};

const HASHED = "#[^\\n]*";
const SLASHED = "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";
const COMMENTS = { python: HASHED, shell: HASHED, data: `${HASHED}|${SLASHED}`, script: SLASHED, systems: SLASHED, query: `--[^\\n]*|${SLASHED}` };
const STRINGS = `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?`;
const TEMPLATES = "|`(?:[^`\\\\]|\\\\[\\s\\S])*`?";
const NUMBERS = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\w*\\b";
const NAMES = "[\\p{L}_$][\\p{L}\\p{N}_$]*";

const readers = new Map();

function reader(family) {
  if (!readers.has(family)) {
    const strings = STRINGS + (family === "script" ? TEMPLATES : "");
    const parts = [`(?<comment>${COMMENTS[family]})`, `(?<string>${strings})`, `(?<number>${NUMBERS})`, `(?<name>${NAMES})`];
    readers.set(family, { expression: new RegExp(parts.join("|"), "gu"), words: new Set(WORDS[family].split(" ")) });
  }
  return readers.get(family);
}

// The text in parts, those that are known with a class. Without a known language, or when very long, it is one part.
export function highlight(text, language) {
  const family = FAMILIES[language.toLowerCase()];
  if (!family || text.length > LONGEST) return [text];
  const { expression, words } = reader(family);
  const parts = [];
  let place = 0;
  for (const match of text.matchAll(expression)) {
    const kind = kindOf(match, words, text, family);
    if (!kind) continue;
    if (match.index > place) parts.push(text.slice(place, match.index));
    parts.push(node("span", { class: `tok-${kind}` }, match[0]));
    place = match.index + match[0].length;
  }
  if (place < text.length) parts.push(text.slice(place));
  return parts;
}

function kindOf({ groups, index, 0: whole }, words, text, family) {
  if (groups.comment !== undefined) return "comment";
  if (groups.string !== undefined) {
    const key = family === "data" && /^\s*:/.test(text.slice(index + whole.length, index + whole.length + 4));
    return key ? "name" : "string";
  }
  if (groups.number !== undefined) return "number";
  if (words.has(family === "query" ? whole.toLowerCase() : whole)) return "keyword";
  return text[index + whole.length] === "(" ? "name" : null;
}
