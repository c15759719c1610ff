// The sampler panel: the numbers sent with a request. An empty box sends nothing: the server's setting applies.

import { el } from "./dom.js";
import { SAMPLER_SETTINGS } from "./sampler_settings.js";

const MAX_INT32 = 2 ** 31 - 1;
const FIELDS = [
  ...SAMPLER_SETTINGS.filter(({ more }) => !more),
  { name: "max_tokens", label: "Longest answer", min: 1, max: MAX_INT32, whole: true, hint: "in tokens" },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, whole: true, hint: "same seed, same answer" },
];
const MORE = SAMPLER_SETTINGS.filter(({ more }) => more);

/** The panel's fields in a form; `onChange` is called after every change. */
export class Settings {
  constructor(form, values, onChange) {
    this.values = {};
    for (const field of [...FIELDS, ...MORE]) {
      if (valid(field, values[field.name])) this.values[field.name] = values[field.name];
    }
    this.stop = typeof values.stop === "string" ? values.stop : "";
    const plain = FIELDS.map((field) => this.numberRow(field, onChange));
    const further = MORE.map((field) => this.numberRow(field, onChange));
    this.boxes = [...plain, ...further];
    const facts = { id: "set-stop", rows: "2", spellcheck: "false", "aria-describedby": "set-stop-hint" };
    this.stops = el("textarea", facts);
    this.stops.value = this.stop;
    this.stops.addEventListener("input", () => {
      this.stop = this.stops.value;
      onChange();
    });
    const hint = el("small", { id: "set-stop-hint" }, "one a line; \\n is a line's end");
    const reset = el("button", { type: "button", onclick: () => this.reset(onChange) }, "Use the server's settings");
    const label = el("label", { for: "set-stop" }, "Stop at");
    const stops = el("div", { class: "tall" }, label, hint, this.stops);
    const more = el("details", {}, el("summary", {}, "More"), ...further.map((box) => box.row));
    more.open = MORE.some(({ name }) => name in this.values);
    form.append(...plain.map((box) => box.row), stops, more, reset);
  }

  /** The fields of a request. */
  requestFields() {
    const stop = this.stop.split("\n").filter(Boolean);
    const fields = { ...this.values };
    if (stop.length) fields.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
    return fields;
  }

  /** What the browser stores. */
  toStorage() {
    return { ...this.values, stop: this.stop };
  }

  reset(onChange) {
    this.values = {};
    this.stops.value = this.stop = "";
    for (const { input } of this.boxes) {
      input.value = "";
      input.removeAttribute("aria-invalid");
    }
    onChange();
  }

  numberRow(field, onChange) {
    const { name, label, min, max, hint } = field;
    const id = `set-${name}`;
    const facts = { id, type: "number", inputmode: "decimal", min, max, step: "any", placeholder: "default" };
    const input = el("input", { ...facts, "aria-describedby": `${id}-hint` });
    input.value = this.values[name] ?? "";
    input.addEventListener("input", () => {
      const value = input.value === "" && input.validity.valid ? null : input.valueAsNumber;
      const good = value === null || valid(field, value);
      input.setAttribute("aria-invalid", String(!good));
      if (value === null || !good) delete this.values[name];
      else this.values[name] = value;
      onChange();
    });
    const words = el("div", {}, el("label", { for: id }, label), el("small", { id: `${id}-hint` }, hint));
    return { input, row: el("div", { class: "wide" }, words, input) };
  }
}

function valid({ min, max, whole }, value) {
  return Number.isFinite(value) && value >= min && value <= max && (!whole || Number.isInteger(value));
}
