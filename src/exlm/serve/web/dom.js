// Making elements. Text goes in as text: nothing here, or anywhere on this page, reads a string as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element; attributes named on… are listeners, those that are false or null are left out; lists are welcome. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat()) node.append(child); // spread, a very long list would not fit the stack
  return node;
}

/** One of the symbols in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows a symbol and says what it does. */
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick }, icon(name));
}

/** Put a text on the clipboard, and say so on the button for a moment. */
export async function copy(text, button) {
  const before = [...button.childNodes];
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyOldWay(text); // pages from another machine, without TLS, have no clipboard
  }
  button.replaceChildren(done ? icon("check") : "Select it by hand");
  button.classList.add("done");
  setTimeout(() => {
    button.replaceChildren(...before);
    button.classList.remove("done");
  }, 1500);
}

function copyOldWay(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
