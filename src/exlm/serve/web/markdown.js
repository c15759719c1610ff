// Markdown as it arrives: blocks in, DOM out. A block is drawn anew while it may still change, and left alone
// once the line that ends it is whole; so any way of cutting a text gives the same nodes in the end. HTML is
// text, and indented text is no code: models fence theirs.

import { copy, el } from "./dom.js";
import { inline } from "./inline.js";

const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const FENCE = /^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const COLUMNS = /^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)*[ \t]*:?-+:?[ \t]*\|?[ \t]*$/;
const DEEPEST = 12;

/** A place where a text grows. */
export class MarkdownStream {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.settled = 0; // characters that are drawn for good
    this.tail = []; // nodes of the rest
  }

  /** Show a text; quick if it only adds to the one shown before. */
  update(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      this.root.replaceChildren();
      [this.settled, this.tail] = [0, []];
    }
    this.text = text;
    this.settle();
    this.draw();
  }

  /** Finish every block that is followed by another in whole lines. */
  settle() {
    const rest = this.text.slice(this.settled);
    const lines = linesOf(rest.slice(0, rest.lastIndexOf("\n") + 1));
    const blocks = parse(lines);
    if (blocks.length < 2) return;
    this.show(blocks.slice(0, -1));
    this.tail = [];
    this.settled += rest.split("\n").slice(0, blocks.at(-1).at).join("\n").length + 1;
  }

  draw() {
    const blocks = parse(linesOf(this.text.slice(this.settled)));
    const [block, code] = [blocks[0], this.tail[0]?.querySelector("pre > code")];
    const same = blocks.length === 1 && this.tail.length === 1 && block.kind === "code" && code;
    if (same && this.tail[0].dataset.language === block.language) {
      code.textContent = block.text; // keeps the reader's place and the button
      return;
    }
    this.show(blocks);
  }

  show(blocks) {
    for (const node of this.tail) node.remove();
    this.tail = blocks.map(build);
    for (const node of this.tail) this.root.append(node);
  }
}

/** The nodes of a whole text. */
export function render(text) {
  return parse(linesOf(text)).map(build);
}

function linesOf(text) {
  return text.split("\n").map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line));
}

function parse(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const nested = depth < DEEPEST ? quote(lines, at, depth) ?? list(lines, at, depth) : null;
    const [block, next] =
      single(lines[at], at) ?? fence(lines, at) ?? nested ?? table(lines, at) ?? paragraph(lines, at);
    blocks.push({ ...block, at });
    at = next;
  }
  return blocks;
}

function single(line, at) {
  const heading = HEADING.exec(line);
  if (heading) {
    const text = (heading[2] ?? "").trimEnd().replace(/(^|[ \t])#+$/, "");
    return [{ kind: "heading", level: heading[1].length, text: text.trim() }, at + 1];
  }
  return RULE.test(line) ? [{ kind: "rule" }, at + 1] : null;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, space, ticks, language] = open;
  let end = at + 1;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= ticks.length && bare === ticks[0].repeat(bare.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => outdented(line, width(space))).join("\n");
  return [{ kind: "code", language: language.trim().split(/\s/)[0], text }, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  for (; at < lines.length; at += 1) {
    const lazy = lines[at].trim() && inside.at(-1)?.trim() && !interrupts(lines[at]);
    if (!QUOTE.test(lines[at]) && !lazy) break;
    inside.push(lines[at].replace(QUOTE, ""));
  }
  return [{ kind: "quote", blocks: parse(inside, depth + 1) }, at];
}

function list(lines, at, depth) {
  const first = itemOf(lines[at]);
  if (!first) return null;
  const items = [];
  while (at < lines.length) {
    const item = itemOf(lines[at]);
    if (!item || item.sign !== first.sign || RULE.test(lines[at])) break;
    const inside = [item.text];
    at += 1;
    for (let next; (next = afterBlanks(lines, at)) < lines.length; ) {
      if (!belongs(lines[next], item, next > at || !inside.at(-1).trim())) break;
      for (; at <= next; at += 1) inside.push(outdented(lines[at], item.inner));
    }
    items.push(parse(inside, depth + 1));
    at = afterBlanks(lines, at);
  }
  return [{ kind: "list", ordered: first.ordered, start: first.number, items }, at];
}

/** Whether a line goes on with an item: two columns deeper, or more of a paragraph it does not stand apart from. */
function belongs(line, item, apart) {
  return width(line) >= item.outer + 2 || (!apart && !interrupts(line) && !itemOf(line));
}

function itemOf(line) {
  const found = ITEM.exec(line);
  if (!found) return null;
  const [, space, sign, gap = " ", text = ""] = found;
  const outer = width(space);
  const inner = outer + sign.length + (width(gap) > 4 ? 1 : width(gap));
  const ordered = sign.length > 1;
  return { outer, inner, text, ordered, number: ordered ? parseInt(sign, 10) : 1, sign: ordered ? sign.at(-1) : sign };
}

function table(lines, at) {
  if (!headsTable(lines, at)) return null;
  const aligned = cells(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return right ? (left ? "center" : "right") : null;
  });
  const rows = [cells(lines[at])];
  for (at += 2; at < lines.length && lines[at].trim() && !interrupts(lines[at]); at += 1) {
    const row = cells(lines[at]);
    rows.push(aligned.map((_, column) => row[column] ?? ""));
  }
  return [{ kind: "table", aligned, rows }, at];
}

function headsTable(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || rule === undefined || !rule.includes("-") || !COLUMNS.test(rule)) return false;
  return cells(lines[at]).length === cells(rule).length;
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  const inside = [lines[at].trimStart()];
  for (at += 1; at < lines.length && lines[at].trim(); at += 1) {
    if (interrupts(lines[at]) || headsTable(lines, at)) break;
    inside.push(lines[at].trimStart());
  }
  return [{ kind: "paragraph", text: inside.join("\n").trimEnd() }, at];
}

/** Whether a line ends a paragraph; a number only if it is 1, since sentences end in numbers too. */
function interrupts(line) {
  const item = itemOf(line);
  const listed = item && item.text.trim() && item.number === 1;
  return Boolean(HEADING.test(line) || RULE.test(line) || FENCE.test(line) || QUOTE.test(line) || listed);
}

function afterBlanks(lines, at) {
  while (at < lines.length && !lines[at].trim()) at += 1;
  return at;
}

function width(text) {
  let columns = 0;
  for (const sign of text) {
    if (sign === " ") columns += 1;
    else if (sign === "\t") columns += 4;
    else break;
  }
  return columns;
}

function outdented(line, columns) {
  let at = 0;
  for (let gone = 0; gone < columns && (line[at] === " " || line[at] === "\t"); at += 1) {
    gone += line[at] === "\t" ? 4 : 1;
  }
  return line.slice(at);
}

function build(block) {
  switch (block.kind) {
    case "heading":
      return el(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text)); // the page has h1 and h2
    case "rule":
      return el("hr");
    case "code":
      return codeBlock(block);
    case "quote":
      return el("blockquote", {}, block.blocks.map(build));
    case "list": {
      const items = block.items.map((blocks) => el("li", {}, blocks.flatMap(itemPart)));
      return el(block.ordered ? "ol" : "ul", { start: block.start !== 1 && block.start }, items);
    }
    case "table":
      return tableBlock(block);
    default:
      return el("p", {}, inline(block.text));
  }
}

/** An item's first paragraph stands beside its sign; a box to tick is shown, not offered. */
function itemPart(block, place) {
  if (place || block.kind !== "paragraph") return [build(block)];
  const task = /^\[([ xX])\] /.exec(block.text);
  if (!task) return inline(block.text);
  return [task[1] === " " ? "☐ " : "☑ ", ...inline(block.text.slice(4))];
}

function codeBlock({ language, text }) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", class: "quiet", "aria-label": "Copy the code" }, "Copy");
  button.addEventListener("click", () => copy(code.textContent, button));
  const caption = el("figcaption", {}, el("span", {}, language || "text"), button);
  return el("figure", { class: "code", "data-language": language }, caption, el("pre", { tabindex: "0" }, code));
}

function tableBlock({ aligned, rows: [head, ...rows] }) {
  const row = (tag, texts) =>
    el("tr", {}, texts.map((text, column) => el(tag, { class: aligned[column] }, inline(text))));
  const body = rows.length ? [el("tbody", {}, rows.map((texts) => row("td", texts)))] : [];
  const whole = el("table", {}, el("thead", {}, row("th", head)), ...body);
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, whole);
}
