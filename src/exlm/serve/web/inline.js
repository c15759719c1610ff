// Markdown within a line: emphasis, code, links. Text in, nodes and strings out. HTML stays text, links go to
// http and https only, and images become links, so that no answer can make a browser fetch anything.

import { el } from "./dom.js";

const ORDINARY = /[^\\\n`*_~[\]!<hH]+/y;
const TICKS = /`+/y;
const ANGLE = /<(https?:\/\/[^\s<>]+)>/iy;
const BARE = /https?:\/\/[^\s<>"`]+/iy;
const TARGET =
  /\(\s{0,8}(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s{1,8}(?:"[^"]*"|'[^']*'))?\s{0,8}\)/y;
const SYMBOL = /[!-/:-@[-`{-~]/; // ASCII only: other scripts put their full stops inside emphasis
const AFTER = ".,;:!?'*_~]|)"; // what follows an address rather than ends it
const SPACE = /\s|^$/;

/** What a text looks like: nodes and strings. */
export function inline(text) {
  return new Scanner(text).all();
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.plain = "";
    this.parts = []; // strings, nodes, and runs of marks that emphasis is made of
    this.brackets = []; // where a link's text may have begun
    this.unclosed = new Set(); // lengths of backtick runs known to have no partner further on
  }

  all() {
    while (this.at < this.text.length) this.step();
    this.flush();
    return emphasised(this.parts);
  }

  step() {
    const run = this.match(ORDINARY);
    if (run) return this.say(run[0], run[0].length);
    switch (this.text[this.at]) {
      case "\\":
        return this.escape();
      case "\n":
        this.plain = this.plain.trimEnd();
        return this.take(el("br"), 1);
      case "`":
        return this.code();
      case "[":
        return this.bracket("[");
      case "!":
        return this.text[this.at + 1] === "[" ? this.bracket("![") : this.say("!", 1);
      case "]":
        return this.close();
      case "<":
      case "h":
      case "H":
        return this.address();
      default:
        return this.marks();
    }
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  say(text, length) {
    this.plain += text;
    this.at += length;
  }

  take(part, length) {
    this.flush();
    this.parts.push(part);
    this.at += length;
  }

  flush() {
    if (this.plain) this.parts.push(this.plain);
    this.plain = "";
  }

  escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") this.take(el("br"), 2);
    else if (SYMBOL.test(next)) this.say(next, 2);
    else this.say("\\", 1);
  }

  code() {
    const ticks = this.match(TICKS)[0];
    const begin = this.at + ticks.length;
    for (let at = begin; !this.unclosed.has(ticks.length); ) {
      TICKS.lastIndex = at = this.text.indexOf("`", at);
      const run = at < 0 ? null : TICKS.exec(this.text)[0];
      if (run === null) this.unclosed.add(ticks.length);
      else if (run.length === ticks.length) {
        const inside = this.text.slice(begin, at).replaceAll("\n", " ");
        const padded = /^ .* $/.test(inside) && inside.trim();
        return this.take(el("code", {}, padded ? inside.slice(1, -1) : inside), at + run.length - this.at);
      } else at += run.length;
    }
    this.say(ticks, ticks.length);
  }

  bracket(sign) {
    this.flush();
    this.brackets.push({ at: this.parts.length, image: sign === "![" });
    this.take(sign, sign.length);
  }

  close() {
    const opener = this.brackets.pop();
    this.at += 1;
    const target = opener && this.match(TARGET);
    const href = target && webAddress((target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"));
    this.at -= 1;
    if (!href) return this.say("]", 1);
    this.flush();
    const inside = this.parts.splice(opener.at).slice(1);
    if (!opener.image) this.brackets = this.brackets.filter((one) => one.image); // no links within links
    const words = inside.flatMap((part) => (part.tagName === "A" ? [...part.childNodes] : [part]));
    this.take(link(href, words.length ? emphasised(words) : href), 1 + target[0].length);
  }

  address() {
    const angled = this.match(ANGLE);
    if (angled && webAddress(angled[1])) return this.take(link(angled[1], angled[1]), angled[0].length);
    const bare = /[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? "") ? null : this.match(BARE);
    const shown = bare && trimmed(bare[0]);
    if (shown && webAddress(shown)) return this.take(link(shown, shown), shown.length);
    this.say(this.text[this.at], 1);
  }

  marks() {
    const mark = this.text[this.at];
    let end = this.at;
    while (this.text[end] === mark) end += 1;
    const count = end - this.at;
    if (mark === "~" && count !== 2) return this.say(mark.repeat(count), count);
    const [before, after] = [this.text[this.at - 1] ?? "", this.text[end] ?? ""];
    const left = !SPACE.test(after) && (!SYMBOL.test(after) || SPACE.test(before) || SYMBOL.test(before));
    const right = !SPACE.test(before) && (!SYMBOL.test(before) || SPACE.test(after) || SYMBOL.test(after));
    const word = mark === "_"; // snake_case is no emphasis
    const open = left && (!word || !right || SYMBOL.test(before));
    const close = right && (!word || !left || SYMBOL.test(after));
    this.take({ mark, count, whole: count, open, close }, count);
  }
}

/** Pair the runs of marks, innermost first; what stays alone is text. */
function emphasised(given) {
  const parts = [...given];
  const floors = new Map(); // below these no opener is left for a kind of closer
  for (let at = 0; at < parts.length; at += 1) {
    const closer = parts[at];
    if (!closer.close || !closer.count) continue;
    const kind = `${closer.mark}${closer.open}${closer.whole % 3}`;
    const floor = floors.get(kind) ?? 0;
    let place = at - 1;
    while (place >= floor && !pairs(parts[place], closer)) place -= 1;
    if (place < floor) {
      floors.set(kind, at);
      continue;
    }
    const opener = parts[place];
    const width = Math.min(2, opener.count, closer.count);
    const inside = parts.slice(place + 1, at).map(shown);
    const node = el(closer.mark === "~" ? "del" : width === 2 ? "strong" : "em", {}, inside);
    opener.count -= width;
    closer.count -= width;
    const left = [opener, node, closer].filter((part) => part.count !== 0);
    parts.splice(place, at - place + 1, ...left);
    for (const [key, value] of floors) floors.set(key, Math.min(value, place + 1));
    at = place + left.length - (closer.count ? 2 : 1);
  }
  return parts.map(shown);
}

function pairs(opener, closer) {
  if (opener.mark !== closer.mark || !opener.open || !opener.count) return false;
  const odd = (opener.close || closer.open) && (opener.whole + closer.whole) % 3 === 0;
  return !odd || (opener.whole % 3 === 0 && closer.whole % 3 === 0);
}

function shown(part) {
  return part.mark ? part.mark.repeat(part.count) : part;
}

/** A bare address without the sentence around it. */
function trimmed(address) {
  let end = address.length;
  while (end && AFTER.includes(address[end - 1])) end -= 1;
  const paired = address[end] === ")" && address.slice(0, end).includes("(");
  return address.slice(0, paired ? end + 1 : end);
}

function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

function link(href, words) {
  return el("a", { href, rel: "noopener noreferrer", target: "_blank" }, words);
}
