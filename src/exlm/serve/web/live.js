// A live view of the server: pages of the cache, the batch and the queue. It polls only while it is visible.

import { state } from "./api.js";
import { el } from "./dom.js";

const POLL_MILLISECONDS = 700;
const KINDS = { shared: "shared", used: "in use", kept: "kept", empty: "empty" };

/** The view inside an element; `start` and `stop` as it is opened and closed. */
export class Live {
  constructor(root) {
    this.root = root;
    this.models = new Map();
    this.open = false;
    this.words = el("p", { class: "facts", role: "status" });
    this.samples = new Map(Object.keys(KINDS).map((kind) => [kind, el("i", { class: `page ${kind}` })]));
    const legend = [...this.samples].map(([kind, sample]) => el("li", {}, sample, KINDS[kind]));
    root.append(this.words, el("ul", { class: "legend" }, legend));
    document.addEventListener("visibilitychange", () => this.open && this.start());
  }

  start() {
    this.open = true;
    clearTimeout(this.timer);
    if (!document.hidden) this.poll();
  }

  stop() {
    this.open = false;
    clearTimeout(this.timer);
  }

  async poll() {
    try {
      this.draw(await state());
    } catch (error) {
      this.words.textContent = error.message;
    }
    clearTimeout(this.timer);
    if (this.open && !document.hidden) this.timer = setTimeout(() => this.poll(), POLL_MILLISECONDS);
  }

  draw({ models, requests }) {
    const words = `${counted(requests.inside, "request")} under way, ${requests.most} at most`;
    if (this.words.textContent !== words) this.words.textContent = words;
    for (const [name, view] of this.models) {
      if (models.some((model) => model.name === name)) continue;
      view.node.remove();
      this.models.delete(name);
    }
    const colour = (kind) => getComputedStyle(this.samples.get(kind)).backgroundColor; // as the theme has it now
    for (const model of models) {
      if (!this.models.has(model.name)) this.models.set(model.name, new ModelView(model.name, this.root));
      this.models.get(model.name).draw(model, colour);
    }
  }
}

class ModelView {
  constructor(name, root) {
    this.canvas = el("canvas", { role: "img", class: "pages" });
    this.pages = el("p", { class: "facts" });
    [this.batch, this.queue] = [el("ul", { class: "jobs" }), el("ul", { class: "jobs" })];
    [this.batched, this.queued] = [el("h4"), el("h4")];
    const parts = [this.canvas, this.pages, this.batched, this.batch, this.queued, this.queue];
    this.node = el("article", {}, el("h3", {}, name), parts);
    root.append(this.node);
  }

  draw({ pages, batch, queue, max_batch_size: most }, colour) {
    const kinds = pages.rows.map((rows, at) => pageKind(rows, pages.users[at]));
    const count = (...wanted) => kinds.filter((kind) => wanted.includes(kind)).length;
    const [used, spare] = [count("used", "shared"), count("kept")];
    const words = `${used} of ${pages.total} pages in use, ${spare} kept for reuse · ${pages.size} tokens each`;
    this.pages.textContent = words;
    this.canvas.setAttribute("aria-label", words);
    paintPages(this.canvas, kinds, pages, colour);
    this.batched.textContent = `Batch · ${batch.length}${most ? ` of ${most}` : ""}`;
    this.queued.textContent = `Queue · ${queue.length}`;
    this.batch.replaceChildren(...batch.map(runningJob));
    this.queue.replaceChildren(...queue.map(waitingJob));
  }
}

function pageKind(rows, users) {
  return users > 1 ? "shared" : users ? "used" : rows ? "kept" : "empty";
}

/** One square for each page, filled as far as it holds tokens; smaller ones where there are many. */
function paintPages(canvas, kinds, { rows, size }, colour) {
  const width = canvas.clientWidth || 280;
  const step = Math.max(3, Math.min(16, Math.floor(Math.sqrt((width * 220) / Math.max(1, kinds.length)))));
  const columns = Math.max(1, Math.floor(width / step));
  const height = Math.ceil(kinds.length / columns) * step;
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  const side = step > 6 ? step - 2 : step - 1;
  const colours = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, colour(kind)]));
  kinds.forEach((kind, at) => {
    const [left, top] = [(at % columns) * step, Math.floor(at / columns) * step];
    const full = kind === "kept" ? 1 : Math.max(0.25, Math.min(1, rows[at] / size));
    brush.fillStyle = colours.empty;
    brush.fillRect(left, top, side, side);
    brush.fillStyle = colours[kind];
    brush.fillRect(left, top + side * (1 - full), side, side * full);
  });
}

function runningJob(job) {
  const reading = job.new_tokens === 0 && job.read_tokens < job.prompt_tokens;
  const [value, max] = reading ? [job.read_tokens, job.prompt_tokens] : [job.new_tokens, job.max_new_tokens];
  const progress = el("progress", { value, max: Math.max(1, max), "aria-label": `Job ${job.job}` });
  return el("li", {}, jobLabel(job), el("small", {}, reading ? "reading" : `${value} of ${max}`), progress);
}

function waitingJob(job) {
  return el("li", {}, jobLabel(job), el("small", {}, `${job.queue_seconds.toFixed(1)} s`));
}

function jobLabel({ job, prompt_tokens: prompt, cached_tokens: cached }) {
  return el("span", {}, `#${job}`, el("small", {}, `prompt ${prompt}${cached ? `, ${cached} cached` : ""}`));
}

function counted(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}
