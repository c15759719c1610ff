// The page: connects the store, the server and the views. It has the open conversation and the answers that are being
// written; several may be at once, each in a conversation of its own.

import { models, streamAnswer } from "./api.js";
import { Chats } from "./chats.js";
import { el } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { Store, addMessage, newChat, pathTo, showBranch } from "./store.js";
import { Thread, grow } from "./thread.js";

const $ = (id) => document.getElementById(id);
const NARROW = matchMedia("(max-width: 60rem)");
const SAVE_EVERY = 2000; // milliseconds, while an answer grows

const store = new Store();
const kept = store.settings();
const runs = new Map(); // by conversation: the answer being written in it
let chat = newChat(typeof kept.system === "string" ? kept.system : "");

const live = new Live($("live"));
const settings = new Settings($("sampling"), kept, keepSettings);
const thread = new Thread($("thread"), $("scroll"), { regenerate, edit, show });
const chats = new Chats($("list"), $("filter"), store, { open, renamed, removed: remove });

// ---- conversations

function open(id, focus = true) {
  chat = store.chats.get(id) ?? newChat($("system").value);
  draw();
  if (NARROW.matches) toggleDrawer("chats", false);
  if (focus) $("draft").focus();
}

function draw() {
  $("system").value = chat.system;
  thread.draw(chat, runs.get(chat.id)?.place);
  document.title = chat.title ? `${chat.title} – exlm` : "exlm";
  document.body.classList.toggle("blank", chat.messages.length === 0);
  chats.draw(chat.id);
  showRunning();
}

function save(changed) {
  if (!store.save(changed)) notice("The browser has no room left to keep this. Export conversations and delete some.");
}

function renamed(changed) {
  save(changed);
  draw();
}

function remove(gone) {
  stop(gone.id);
  store.remove(gone.id);
  if (gone.id === chat.id) open(null);
  else chats.draw(chat.id);
  notice(`Deleted “${gone.title || "New chat"}”.`, "Undo", () => {
    save(gone);
    chats.draw(chat.id);
  });
}

function show(place) {
  stop(chat.id);
  showBranch(chat, place);
  save(chat);
  draw();
}

// ---- answers

function send(text) {
  const parent = chat.at;
  run(addMessage(chat, { role: "user", text, parent, thought: "", error: "", facts: [] }));
}

function edit(place, text) {
  stop(chat.id);
  chat.at = chat.messages[place].parent;
  send(text);
}

function regenerate(place) {
  stop(chat.id);
  const { parent, text, error } = chat.messages[place];
  run(parent, error && !text ? place : null); // an answer that never began is no variant worth keeping
}

/** Have an answer to a message written, as a new message or in the place `replaced` of an earlier one. */
async function run(parent, replaced = null) {
  const message = { role: "assistant", text: "", parent, thought: "", error: "", facts: [] };
  const place = replaced ?? addMessage(chat, message);
  chat.messages[place] = message;
  chat.at = place;
  const current = { chat, place, message, control: new AbortController(), pieces: 0, first: 0, saved: Date.now() };
  runs.set(chat.id, current);
  chat.updated = Date.now();
  save(chat);
  draw();
  announce("Answering.");
  let end = null;
  try {
    for await (const event of streamAnswer(requestBody(current), current.control.signal)) {
      end = event.usage ? event : end;
      applyEvent(current, event.choices[0]);
    }
    announce("The answer is complete.");
  } catch (error) {
    if (error.name !== "AbortError") {
      message.error = error.message;
      announce(`The answer failed. ${error.message}`);
    } else announce("Stopped.");
  }
  message.facts = summaryOf(current, end);
  finish(current);
}

function requestBody({ chat: asked, message }) {
  const said = pathTo(asked, message.parent).map((place) => asked.messages[place]);
  const messages = said.map(({ role, text }) => ({ role, content: text }));
  if (asked.system.trim()) messages.unshift({ role: "system", content: asked.system });
  const model = $("model").value;
  return { ...settings.requestFields(), ...(model && { model }), messages };
}

function applyEvent(current, choice) {
  if (!choice) return;
  const { content = "", reasoning_content: thought = "" } = choice.delta;
  const { message } = current;
  message.text += content ?? "";
  message.thought += thought ?? "";
  current.reason = choice.finish_reason ?? current.reason;
  if (content || thought) {
    current.first ||= performance.now();
    current.pieces += 1;
  }
  if (Date.now() - current.saved > SAVE_EVERY) {
    current.saved = Date.now();
    store.save(current.chat);
  }
  if (current.chat === chat && !current.frame) current.frame = requestAnimationFrame(() => refresh(current));
}

function refresh(current) {
  current.frame = null;
  if (current.chat !== chat || runs.get(chat.id) !== current) return;
  current.message.facts = speed(current);
  thread.update(current.place, true);
}

function finish(current) {
  if (runs.get(current.chat.id) === current) runs.delete(current.chat.id);
  if (store.chats.get(current.chat.id) === current.chat) save(current.chat);
  if (current.chat !== chat) return;
  thread.update(current.place, false);
  chats.draw(chat.id);
  showRunning();
}

function speed({ pieces, first }) {
  const seconds = (performance.now() - first) / 1000;
  return pieces > 3 && seconds > 0.2 ? [`≈ ${((pieces - 1) / seconds).toFixed(1)} tokens/s`] : [];
}

function summaryOf(current, end) {
  const facts = end ? [] : speed(current);
  if (end) {
    const { usage, timings } = end;
    const cached = usage.prompt_tokens_details.cached_tokens;
    const wait = timings.queue_seconds + timings.prompt_seconds;
    facts.push(`${timings.tokens_per_second.toFixed(1)} tokens/s`, `${usage.completion_tokens} tokens`);
    facts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
    facts.push(`first after ${wait.toFixed(2)} s`);
  }
  if (current.reason === "length") facts.push("cut at the longest allowed");
  if (current.control.signal.aborted) facts.push("stopped");
  return facts;
}

function stop(id) {
  runs.get(id)?.control.abort();
  runs.delete(id);
}

function showRunning() {
  const running = runs.has(chat.id);
  $("composer").classList.toggle("running", running);
  $("send").ariaLabel = running ? "Stop" : "Send";
  $("send").title = running ? "Stop (Esc)" : "Send (Enter)";
}

// ---- the rest of the page

function announce(words) {
  $("status").textContent = words;
}

function notice(words, action, act) {
  const gone = () => $("notice").replaceChildren();
  const button = action && el("button", { type: "button", onclick: () => (gone(), act()) }, action);
  const close = el("button", { type: "button", "aria-label": "Dismiss", onclick: gone }, "×");
  $("notice").replaceChildren(el("span", {}, words), ...(button ? [button] : []), close);
}

function keepSettings() {
  store.saveSettings({ ...settings.toStorage(), model: $("model").value, system: $("system").value });
}

function toggleDrawer(name, wanted) {
  const now = document.body.classList.toggle(`${name}-open`, wanted);
  $("open-chats").ariaExpanded = document.body.classList.contains("chats-open");
  $("main").inert = NARROW.matches && now;
}

/** Close what lies over the conversation; whether there was anything. */
function closeDrawers() {
  if (!$("main").inert) return false;
  toggleDrawer("chats", false);
  showPanel("");
  return true;
}

/** Show one side of the panel; the same again, or none, closes it. */
function showPanel(side) {
  const wanted = side && $(side).hidden ? side : "";
  for (const one of ["setup", "live"]) {
    $(one).hidden = one !== wanted;
    $(`open-${one}`).ariaExpanded = one === wanted;
  }
  toggleDrawer("panel", wanted !== "");
  if (wanted === "live") live.start();
  else live.stop();
  if (NARROW.matches && wanted) $("close-panel").focus();
}

async function listModels() {
  const select = $("model");
  try {
    const known = await models();
    const option = ({ id, loaded }) =>
      el("option", { value: id, disabled: !loaded }, loaded ? id : `${id} (not loaded)`);
    select.replaceChildren(...known.map(option));
    const usable = known.filter((one) => one.loaded).map((one) => one.id);
    select.value = usable.includes(kept.model) ? kept.model : (usable[0] ?? "");
  } catch (error) {
    notice(error.message, "Try again", listModels);
  }
}

/** Turn to the other theme; where that is the system's, follow the system again. */
function turnTheme() {
  const root = document.documentElement.dataset;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const next = (root.theme || system) === "dark" ? "light" : "dark";
  root.theme = next === system ? "" : next;
  store.put("exlm.theme", root.theme);
}

function exportAll() {
  const href = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
  el("a", { href, download: `exlm-chats-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

async function importAll(event) {
  const [file] = event.target.files;
  const [kept, all] = file ? store.imported(await file.text()) : [0, 0];
  event.target.value = "";
  notice(all ? `${kept} of ${all} imported.` : "There are no conversations in this file.");
  chats.draw(chat.id);
}

function onSubmit(event) {
  event.preventDefault();
  if (runs.has(chat.id)) return stopShown();
  const text = $("draft").value;
  if (!text.trim()) return;
  $("draft").value = "";
  grow($("draft"));
  send(text);
}

function stopShown() {
  runs.get(chat.id)?.control.abort();
}

function findChats() {
  toggleDrawer("chats", true);
  $("filter").focus();
  $("filter").select();
}

function onEscape() {
  if (closeDrawers()) return;
  if (runs.has(chat.id)) stopShown();
  else $("draft").focus();
}

function onKeydown(event) {
  const typing = event.target.closest?.("input, textarea, select");
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") findChats();
  else if (event.key === "Escape") onEscape();
  else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) $("draft").focus();
  else return;
  event.preventDefault();
}

function addListeners() {
  document.addEventListener("keydown", onKeydown);
  $("composer").addEventListener("submit", onSubmit);
  $("draft").addEventListener("input", () => grow($("draft")));
  $("draft").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (runs.has(chat.id)) event.preventDefault(); // what is typed ahead waits; Esc and the button stop
    else onSubmit(event);
  });
  const clicks = {
    new: () => open(null),
    "open-chats": () => {
      toggleDrawer("chats");
      if (NARROW.matches) $("close-chats").focus();
    },
    "close-chats": () => toggleDrawer("chats"),
    "open-setup": () => showPanel("setup"),
    "open-live": () => showPanel("live"),
    "close-panel": () => showPanel(""),
    scrim: closeDrawers,
    theme: turnTheme,
    export: exportAll,
  };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  $("import").addEventListener("change", importAll);
  $("model").addEventListener("change", keepSettings);
  $("system").addEventListener("input", () => {
    chat.system = $("system").value;
    if (chat.messages.length) save(chat);
    keepSettings();
  });
  addEventListener("storage", ({ key: changed }) => {
    const id = store.changed(changed);
    if (runs.has(id)) store.chats.set(id, runs.get(id).chat); // the answer being written here comes last
    else if (id === chat.id && store.chats.has(id)) open(id, false);
    else chats.draw(chat.id);
  });
}

addListeners();
toggleDrawer("chats", !NARROW.matches);
NARROW.addEventListener("change", () => toggleDrawer("chats", !NARROW.matches));
draw();
listModels();
if (store.unreadable) notice(`${store.unreadable} of the conversations kept here cannot be read, and were left alone.`);
if (!NARROW.matches) $("draft").focus();
