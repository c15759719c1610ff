// Markdown to DOM. markdown-it parses, lowlight highlights code and KaTeX sets formulas; this module turns their
// trees into elements, so that no text is ever read as HTML, and redraws only what can still change while an
// answer streams in. However a text is cut on the way, the nodes in the end are the same.

import { copy, el } from "./dom.js";
import { mathElement, mathRules } from "./math.js";
import { common, createLowlight } from "./vendor/lowlight.js";
import { MarkdownIt, cjkFriendly } from "./vendor/markdown-it.js";

const LONGEST_HIGHLIGHTED = 50_000; // characters of a code block; longer ones stay plain, to keep up with a stream

const lowlight = createLowlight(common);
const parser = new MarkdownIt({ html: false, breaks: true, linkify: true, maxNesting: 30 });
parser.use(cjkFriendly).use(mathRules).use(shallowNesting);
// Models fence their code; a line below a text is a rule, not a heading; "&amp;" is what they mean to show; and a
// reference that comes late would change what is drawn already.
parser.disable(["code", "lheading", "entity", "reference"]);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
for (const scheme of ["ftp:", "mailto:", "//"]) parser.linkify.add(scheme, null);
parser.normalizeLink = webAddress;
parser.normalizeLinkText = (text) => text;
parser.validateLink = Boolean;
withoutEntities(parser.helpers);

/** The nodes of a whole text. */
export function render(text) {
  return build(parse(normalised(text)));
}

/** An element's content that grows. */
export class MarkdownStream {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.settled = 0; // characters whose nodes will not change any more
    this.tail = []; // the nodes of the others
  }

  /** Show a text; quick if it only adds to the one shown before. */
  update(given) {
    const text = normalised(given);
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      this.root.replaceChildren();
      [this.settled, this.tail] = [0, []];
    }
    this.text = text;
    this.settle();
    this.draw(parse(text.slice(this.settled)));
  }

  /** Draw for good every block that is followed by another one, both in whole lines. */
  settle() {
    const lines = this.text.slice(this.settled, this.text.lastIndexOf("\n") + 1);
    const tokens = parse(lines);
    const last = tokens.findLastIndex(({ level, nesting }) => level === 0 && nesting >= 0);
    if (last <= 0) return;
    this.show(build(tokens.slice(0, last)));
    this.tail = [];
    this.settled += offsetOf(lines, tokens[last].map[0]);
  }

  draw(tokens) {
    const code = this.tail.length === 1 && this.tail[0].querySelector?.(":scope > pre > code");
    if (code && tokens.length === 1 && tokens[0].type === "fence" && this.tail[0].dataset.language === languageOf(tokens[0])) {
      code.replaceChildren(...highlighted(tokens[0])); // keeps the scroll position and the button
    } else this.show(build(tokens));
  }

  show(nodes) {
    for (const node of this.tail) node.remove();
    this.tail = nodes;
    for (const node of nodes) this.root.append(node);
  }
}

function parse(text) {
  return parser.parse(text, {});
}

function normalised(text) {
  return text.replace(/\r\n?/g, "\n");
}

function offsetOf(text, line) {
  let at = 0;
  for (let left = line; left > 0; left -= 1) at = text.indexOf("\n", at) + 1;
  return at;
}

/** The nodes of block or inline tokens. */
function build(tokens) {
  const top = { parts: [] };
  const open = [top];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting === 1) open.push(openElement(token, parent));
    else if (token.nesting === -1) {
      const { parts, close } = open.pop();
      for (const part of close(parts)) open.at(-1).parts.push(part);
    } else for (const part of leafNodes(token, parent)) parent.parts.push(part);
  }
  return top.parts;
}

/** An element whose content follows: `close` makes nodes of that. */
function openElement(token, parent) {
  const frame = (close, more = {}) => ({ parts: [], close, ...more });
  const simple = (tag, attributes) => frame((parts) => [el(tag, attributes, parts)]);
  switch (token.type) {
    case "heading_open":
      return simple(`h${Math.min(6, Number(token.tag[1]) + 2)}`); // the page has h1 and h2
    case "paragraph_open": // the first one of an item stands beside its marker
      return parent.item && !parent.parts.length ? frame(withCheckbox) : simple("p");
    case "list_item_open":
      return frame((parts) => [el("li", {}, parts)], { item: true });
    case "ordered_list_open":
      return simple("ol", { start: token.attrGet("start") });
    case "table_open": {
      const region = { class: "table", tabindex: "0", role: "region", "aria-label": "Table" };
      return frame((parts) => [el("div", region, el("table", {}, parts))]);
    }
    case "th_open":
    case "td_open":
      return simple(token.tag, { class: /right|center/.exec(token.attrGet("style"))?.[0] });
    case "link_open":
      return frame((parts) => link(token, parts), { link: true });
    case "s_open":
      return simple("del");
    default:
      return simple(token.tag);
  }
}

function leafNodes(token, parent) {
  switch (token.type) {
    case "inline":
      return build(token.children);
    case "text":
      return token.content ? [token.content] : [];
    case "softbreak":
    case "hardbreak":
      return [el("br")];
    case "code_inline":
      return [el("code", {}, token.content)];
    case "fence":
      return [codeBlock(token)];
    case "hr":
      return [el("hr")];
    case "image": {
      const words = build(token.children);
      return parent.link ? words : [anchor(token.attrGet("src"), words)]; // nothing is fetched unasked
    }
    case "math":
      return [mathElement(token.content, token.meta.display, token.meta.source)];
    case "unfinished_math":
      return [el("p", {}, token.content)];
    default:
      return [token.content];
  }
}

/** A box to tick is shown, not offered. */
function withCheckbox(parts) {
  const task = typeof parts[0] === "string" && /^\[([ xX])\] /.exec(parts[0]);
  return task ? [(task[1] === " " ? "☐ " : "☑ ") + parts[0].slice(4), ...parts.slice(1)] : parts;
}

function codeBlock(token) {
  const language = languageOf(token);
  const code = el("code", {}, highlighted(token));
  const button = el("button", { type: "button", class: "quiet", "aria-label": "Copy the code" }, "Copy");
  button.addEventListener("click", () => copy(code.textContent, button));
  const caption = el("figcaption", {}, el("span", {}, language || "text"), button);
  return el("figure", { class: "code", "data-language": language }, caption, el("pre", { tabindex: "0" }, code));
}

function languageOf(token) {
  return token.info.trim().split(/\s/)[0];
}

function highlighted(token) {
  const text = token.content.replace(/\n$/, "");
  const language = languageOf(token).toLowerCase();
  if (!lowlight.registered(language) || text.length > LONGEST_HIGHLIGHTED) return text ? [text] : [];
  return lowlight.highlight(language, text).children.map(highlightedNode);
}

function highlightedNode({ type, value, properties, children }) {
  if (type === "text") return value;
  return el("span", { class: properties.className.join(" ") }, children.map(highlightedNode));
}

function link(token, parts) {
  const href = token.attrGet("href");
  if (!href) return parts;
  if (token.info !== "auto") return [anchor(href, parts.length ? parts : [href])];
  const written = parts.join("");
  const address = token.markup === "linkify" ? written.replace(/[.,;:!?'"*_~|]+$/, "") : written;
  return [anchor(address, [address]), written.slice(address.length)].filter(Boolean);
}

function anchor(href, parts) {
  return el("a", { href, rel: "noopener noreferrer", target: "_blank" }, parts);
}

/** An address on the web in its full form, empty for anything else; what is empty becomes no link. */
function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return "";
  try {
    return new URL(text).href;
  } catch {
    return "";
  }
}

/** Links go where their text says: no entities are decoded in addresses. */
function withoutEntities(helpers) {
  const original = helpers.parseLinkDestination;
  helpers.parseLinkDestination = (text, start, end) => {
    const found = original(text, start, end);
    const written = found.ok ? text.slice(start, found.pos).replace(/^<(.*)>$/, "$1") : "";
    return found.ok ? { ...found, str: written.replace(/\\([!-/:-@[-`{-~])/g, "$1") } : found;
  };
}

/**
 * Lines indented by two columns belong to a list item, also where its marker is wider: models write
 * "1. one" above "  - two". Their indentation is raised to that of the item's text before markdown-it looks.
 */
function shallowNesting(markdown) {
  const MARKER = /^([-*+]|\d{1,9}[.)])([ \t]+|$)/;
  const { ruler } = markdown.block;
  const rule = ruler.__rules__.find(({ name }) => name === "list");
  const list = rule.fn;
  const raised = (state, start, end, silent) => {
    if (!silent && list(state, start, end, true)) raise(state, start, end);
    return list(state, start, end, silent);
  };
  ruler.at("list", raised, { alt: rule.alt });

  function raise(state, start, end) {
    const outer = state.sCount[start];
    let [inner, more] = [0, 0];
    for (let line = start; line < end; line += 1) {
      const text = state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
      const marker = MARKER.exec(text);
      if (!text) continue;
      if (state.sCount[line] >= outer + 2) {
        if (state.sCount[line] < inner && marker) more = Math.max(more, inner - state.sCount[line]);
        state.sCount[line] += more;
      } else if (marker && (line === start || state.sCount[line] >= outer)) {
        [inner, more] = [state.sCount[line] + marker[1].length + (marker[2].length > 4 ? 1 : marker[2].length || 1), 0];
      } else return;
    }
  }
}
