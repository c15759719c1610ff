// The view of one conversation's messages. It draws a conversation and calls `actions` for what is clicked; main.js
// owns the messages and changes them.

import { copy, el, iconButton } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { pathTo, variants } from "./store.js";

const NEAR = 80; // pixels from the end within which the view follows a growing answer

/** The list of messages. `actions` has: regenerate(place), edit(place, text), show(place). */
export class Thread {
  constructor(list, scroller, actions) {
    [this.list, this.scroller, this.actions] = [list, scroller, actions];
    this.shown = new Map(); // by place: what can grow
  }

  /** Draw a conversation; `growing` tells which message is being written. */
  draw(chat, growing) {
    this.chat = chat;
    this.shown.clear();
    this.list.replaceChildren(...pathTo(chat).map((place) => this.item(place, place === growing)));
    this.toEnd();
  }

  /** Bring one message up to date. */
  update(place, growing) {
    const entry = this.shown.get(place);
    if (!entry) return;
    const follow = this.atEnd();
    if (growing) this.fill(entry, this.chat.messages[place], true);
    else {
      entry.node.replaceWith(this.item(place, false));
      if (entry.fold) this.shown.get(place).fold.open = entry.fold.open;
    }
    if (follow) this.toEnd();
  }

  atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  item(place, growing) {
    const message = this.chat.messages[place];
    const isUser = message.role === "user";
    const body = el("div", { class: isUser ? "said" : "markdown" });
    const node = el("li", { class: `message ${message.role}`, "data-place": place, "aria-busy": growing && "true" });
    const entry = { node, body, stream: new MarkdownStream(body), facts: el("span", { class: "facts" }) };
    this.shown.set(place, entry);
    node.append(el("h2", { class: "hidden" }, isUser ? "You" : "Answer"), body);
    if (isUser) body.textContent = message.text;
    else this.fill(entry, message, growing);
    node.append(growing ? el("footer", {}, entry.facts) : this.footer(place, message, entry));
    return node;
  }

  /** Show what an answer has so far. */
  fill(entry, message, growing) {
    entry.stream.update(message.text);
    entry.facts.textContent = message.facts.join(" · ");
    if (message.thought && !entry.thought) {
      entry.thought = el("div", { class: "markdown" });
      entry.thoughts = new MarkdownStream(entry.thought);
      entry.fold = el("details", { class: "thought" }, el("summary", {}, "Thoughts"), entry.thought);
      entry.body.before(entry.fold);
    }
    entry.thoughts?.update(message.thought);
    entry.fold?.classList.toggle("busy", growing && !message.text);
    entry.node.classList.toggle("waiting", growing && !message.text && !message.thought);
    if (message.error && !growing) entry.body.after(this.failure(message.error, Number(entry.node.dataset.place)));
  }

  failure(words, place) {
    const again = el("button", { type: "button", onclick: () => this.actions.regenerate(place) }, "Try again");
    return el("div", { class: "failure" }, el("p", {}, words), again);
  }

  footer(place, message, entry) {
    const isUser = message.role === "user";
    const button = iconButton("copy", "Copy", () => copy(message.text, button));
    const again = isUser
      ? iconButton("edit", "Edit, and go on from here", () => this.edit(place, entry))
      : iconButton("again", "Answer again", () => this.actions.regenerate(place));
    return el("footer", {}, this.branches(place), button, again, entry.facts);
  }

  branches(place) {
    const all = variants(this.chat, place);
    if (all.length < 2) return [];
    const at = all.indexOf(place);
    const turn = (name, label, to) => {
      const button = iconButton(name, label, () => this.actions.show(all[to]));
      button.disabled = !(to in all);
      return button;
    };
    const count = el("span", { class: "count" }, `${at + 1} / ${all.length}`);
    return [turn("left", "The one before", at - 1), count, turn("right", "The next one", at + 1)];
  }

  /** Let a message be written anew in its own place. */
  edit(place, entry) {
    const area = el("textarea", { "aria-label": "Edit the message", rows: "3" });
    area.value = this.chat.messages[place].text;
    const cancel = () => {
      const back = this.item(place, false);
      form.closest("li").replaceWith(back);
      back.querySelector("footer button")?.focus();
    };
    const submit = (event) => {
      event?.preventDefault();
      if (area.value.trim()) this.actions.edit(place, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      else return;
      event.stopPropagation();
    });
    const buttons = [
      el("button", { type: "button", onclick: cancel }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Send"),
    ];
    const form = el("form", { class: "edit", onsubmit: submit }, area, el("div", {}, ...buttons));
    entry.node.replaceChildren(form);
    grow(area);
    area.addEventListener("input", () => grow(area));
    area.focus();
  }
}

/** Give a text box the height of its text. */
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
