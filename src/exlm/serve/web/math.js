// Formulas in Markdown: $…$ and \(…\) within a line, $$…$$ and \[…\] on their own. KaTeX, half of what this page
// could load, is fetched from the server with the first formula; until then, and where it cannot make sense of
// one, the source is shown.

import { el } from "./dom.js";

const PAIRS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };
const LONGEST = 5000; // characters of a formula within a line
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 40, maxExpand: 500 };

let katex = null;
let loading = null;

/** The markdown-it rules that find formulas. */
export function mathRules(markdown) {
  markdown.inline.ruler.before("escape", "math", inlineMath);
  markdown.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "blockquote", "list"] });
}

/** The element of a formula. */
export function mathElement(tex, display, source) {
  const node = el("span", { class: display ? "math display" : "math" }, source);
  if (katex) typeset(node, tex, display);
  else load().then(() => typeset(node, tex, display)).catch(() => {});
  return node;
}

function typeset(node, tex, display) {
  const shown = el("span");
  try {
    katex.render(tex, shown, { ...OPTIONS, displayMode: display });
    node.replaceChildren(...shown.childNodes);
  } catch {
    // The source stays.
  }
}

function load() {
  loading ??= (async () => {
    document.head.append(el("link", { rel: "stylesheet", href: "vendor/katex.css" }));
    katex = await import("./vendor/katex.js");
  })();
  return loading;
}

function inlineMath(state, silent) {
  const begin = state.src.slice(state.pos, state.pos + 2);
  const opening = begin in PAIRS ? begin : begin[0];
  const closing = PAIRS[opening];
  if (!closing) return false;
  const start = state.pos + opening.length;
  const text = state.src.slice(start, Math.min(state.posMax, start + LONGEST));
  const length = opening === "$" ? dollarEnd(text) : text.indexOf(closing);
  if (length < 1 || !text.slice(0, length).trim()) return false;
  const end = start + length + closing.length;
  if (!silent) push(state, text.slice(0, length), opening, state.src.slice(state.pos, end));
  state.pos = end;
  return true;
}

/** Where a formula in single dollars ends, at the next dollar; prices, such as $5 or $10, are none. */
function dollarEnd(text) {
  let at = text.indexOf("$");
  while (text[at - 1] === "\\") at = text.indexOf("$", at + 1);
  const tight = at > 0 && !/^\s|\s$|`/.test(text.slice(0, at));
  return tight && !/\d/.test(text[at + 1] ?? "") ? at : -1;
}

/**
 * A formula that begins a line: $$ or \[ alone, up to the line that ends in its partner; or all of it in one line.
 * A blank line ends it too: what is drawn must not depend on a partner that may come later.
 */
function blockMath(state, start, end, silent) {
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
  const first = lineAt(start);
  const opening = first.slice(0, 2);
  if (opening !== "$$" && opening !== "\\[") return false;
  const closing = PAIRS[opening];
  const whole = first.length > 4 && first.endsWith(closing);
  if (!whole && first !== opening) return false;
  if (silent) return true;
  const lines = [first];
  let next = start + 1;
  let closed = whole;
  for (; !closed && next < end && lineAt(next) && state.sCount[next] >= state.blkIndent; next += 1) {
    lines.push(lineAt(next));
    closed = lines.at(-1).endsWith(closing);
  }
  const source = lines.join("\n");
  if (closed) push(state, source.slice(2, -2), opening, source);
  else state.push("unfinished_math", "", 0).content = source;
  const token = state.tokens.at(-1);
  [token.map, token.block, state.line] = [[start, next], true, next];
  return true;
}

function push(state, tex, opening, source) {
  const token = state.push("math", "", 0);
  token.content = tex.trim();
  token.meta = { display: opening === "$$" || opening === "\\[", source };
}
