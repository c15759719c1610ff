// Conversations, and where they are kept: in this browser and nowhere else. A conversation is a tree, so that
// editing and regenerating lose nothing: a list of messages, each naming an earlier one as its parent, and the
// message at the end of the branch that is shown. What storage holds is checked like anything from outside.

const CHAT = "exlm.chat.";
const SETTINGS = "exlm.settings";
const ROLES = ["user", "assistant"];

/** An empty conversation. */
export function newChat(system = "") {
  const id = Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");
  return { id, title: "", system, updated: Date.now(), messages: [], at: -1 };
}

/** Add a message below another one, and show it; its place. */
export function addMessage(chat, message) {
  chat.messages.push(message);
  chat.at = chat.messages.length - 1;
  if (!chat.title && message.role === "user") chat.title = message.text.trim().split("\n")[0].slice(0, 80);
  return chat.at;
}

/** The places of the messages shown, from the first to one of them. */
export function pathTo(chat, place = chat.at) {
  const path = [];
  for (let at = place; at >= 0; at = chat.messages[at].parent) path.push(at);
  return path.reverse();
}

/** The places of a message and of those said instead of it. */
export function variants(chat, place) {
  const { parent, role } = chat.messages[place];
  return [...chat.messages.keys()].filter((at) => {
    const other = chat.messages[at];
    return other.parent === parent && other.role === role;
  });
}

/** Show the branch of a message, down to the newest that was said in it. */
export function showBranch(chat, place) {
  for (let at = place; at >= 0; ) {
    chat.at = at;
    at = chat.messages.findLastIndex((message) => message.parent === at);
  }
}

/** Everything kept in this browser. */
export class Store {
  constructor(box = storage()) {
    this.box = box;
    this.chats = new Map();
    this.unreadable = 0;
    for (const key of Object.keys(box)) this.changed(key);
  }

  /** Read again what another window may have changed; the id of the conversation, null if it is none. */
  changed(key) {
    if (!key?.startsWith(CHAT)) return null;
    const [id, text] = [key.slice(CHAT.length), this.box.getItem(key)];
    const chat = text === null ? null : validChat(parseJson(text));
    if (chat?.id === id) this.chats.set(id, chat);
    else this.chats.delete(id);
    if (text !== null && chat?.id !== id) this.unreadable += 1; // left where it is: it may be of a later version
    return id;
  }

  /** Conversations whose title or text has these words, the latest first. */
  list(words = "") {
    const wanted = words.toLowerCase();
    const has = (text) => text.toLowerCase().includes(wanted);
    return [...this.chats.values()]
      .filter((chat) => !wanted || has(chat.title) || chat.messages.some((message) => has(message.text)))
      .sort((one, other) => other.updated - one.updated);
  }

  /** Keep a conversation; false if there is no room for it. */
  save(chat) {
    this.chats.set(chat.id, chat);
    return this.put(CHAT + chat.id, chat);
  }

  /** Forget a conversation. */
  remove(id) {
    this.chats.delete(id);
    this.box.removeItem(CHAT + id);
  }

  /** The settings kept, or none. */
  settings() {
    const found = parseJson(this.box.getItem(SETTINGS) ?? "{}");
    return found && typeof found === "object" && !Array.isArray(found) ? found : {};
  }

  saveSettings(settings) {
    return this.put(SETTINGS, settings);
  }

  /** All conversations as JSON text. */
  exported() {
    return JSON.stringify({ exlm_chats: 1, chats: this.list() }, null, 1);
  }

  /** Add the conversations of a file that was exported; how many could be kept, and how many there were. */
  imported(text) {
    const found = parseJson(text);
    const chats = (Array.isArray(found?.chats) ? found.chats : []).map(validChat).filter(Boolean);
    const own = (chat) => (this.chats.has(chat.id) ? { ...chat, id: newChat().id } : chat);
    return [chats.filter((chat) => this.save(own(chat))).length, chats.length];
  }

  put(key, value) {
    try {
      this.box.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}

/** The browser's storage, or one that lasts as long as the page where there is none. */
function storage() {
  try {
    localStorage.getItem(SETTINGS);
    return localStorage;
  } catch {
    const box = Object.create({
      getItem: (key) => box[key] ?? null,
      setItem: (key, value) => void (box[key] = value),
      removeItem: (key) => void delete box[key],
    });
    return box;
  }
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** A conversation with nothing in it but what one has; null for what is none. */
function validChat(found) {
  if (typeof found?.id !== "string" || !found.id || !Array.isArray(found.messages)) return null;
  const messages = found.messages.map(validMessage);
  if (messages.includes(null)) return null;
  const at = Number.isInteger(found.at) && found.at in messages ? found.at : messages.length - 1;
  const updated = Number.isFinite(found.updated) ? found.updated : 0;
  return { id: found.id, title: stringOrEmpty(found.title), system: stringOrEmpty(found.system), updated, messages, at };
}

function validMessage(found, place) {
  if (!ROLES.includes(found?.role) || typeof found.text !== "string") return null;
  const { role, text, parent } = found;
  if (!Number.isInteger(parent) || parent < -1 || parent >= place) return null;
  const facts = Array.isArray(found.facts) ? found.facts.filter((fact) => typeof fact === "string") : [];
  return { role, text, parent, thought: stringOrEmpty(found.thought), error: stringOrEmpty(found.error), facts };
}

function stringOrEmpty(value) {
  return typeof value === "string" ? value : "";
}
