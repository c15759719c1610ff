// The list of conversations at the side: find, open, rename, delete. It shows what the store has.

import { el, iconButton } from "./dom.js";

/** `actions` has: open(id), renamed(chat), removed(chat). */
export class Chats {
  constructor(list, filter, store, actions) {
    [this.list, this.filter, this.store, this.actions] = [list, filter, store, actions];
    filter.addEventListener("input", () => this.draw(this.current));
    list.parentElement.addEventListener("keydown", (event) => this.moveFocus(event));
  }

  /** Show the list; the one with this id is open. */
  draw(current) {
    this.current = current;
    const found = this.store.list(this.filter.value.trim());
    this.list.replaceChildren(...found.map((chat) => this.item(chat)));
    if (!found.length) {
      const words = this.filter.value ? "Nothing found." : "Conversations are kept in this browser.";
      this.list.append(el("li", { class: "facts" }, words));
    }
  }

  item(chat) {
    const here = chat.id === this.current;
    const name = chat.title || "New chat";
    const facts = { type: "button", class: "name", title: name, "aria-current": here && "true" };
    const open = el("button", { ...facts, onclick: () => this.actions.open(chat.id) }, name);
    const row = el("li", { class: here ? "here" : null, "data-id": chat.id }, open);
    open.addEventListener("dblclick", () => this.rename(row, chat));
    row.append(
      iconButton("edit", `Rename ${name}`, () => this.rename(row, chat)),
      iconButton("bin", `Delete ${name}`, () => this.actions.removed(chat)),
    );
    return row;
  }

  rename(row, chat) {
    const input = el("input", { "aria-label": "Name of the conversation", maxlength: "120" });
    input.value = chat.title;
    let over = false;
    const end = (keep) => {
      if (over) return;
      over = true;
      if (keep && input.value.trim()) {
        chat.title = input.value.trim();
        this.actions.renamed(chat);
      }
      this.draw(this.current);
      this.list.querySelector(`[data-id="${CSS.escape(chat.id)}"] .name`)?.focus();
    };
    input.addEventListener("blur", () => end(true));
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
    });
    row.replaceChildren(input);
    input.select();
  }

  /** Arrows go from one conversation to the next. */
  moveFocus(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const stops = [this.filter, ...this.list.querySelectorAll(".name")];
    const next = stops[stops.indexOf(document.activeElement) + step];
    next?.focus();
    event.preventDefault();
  }
}
