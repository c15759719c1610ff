// The server, as this page sees it: models, its inner state, and answers as they are made. What goes wrong
// becomes an error in words that can be shown as they are.

/** The server said no, or could not be asked. */
export class Refusal extends Error {}

/** The registered models. */
export async function models() {
  return (await (await reached("v1/models")).json()).data;
}

/** Pages, queue and batch at this moment. */
export async function state(signal) {
  return (await reached("v1/internal/state", { signal })).json();
}

/** The events of an answer, one by one, until it is whole. */
export async function* answer(body, signal) {
  const reply = await reached("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refusal(event.error.message);
    yield event;
  }
  throw new Refusal("The answer broke off: the connection to the server was lost.");
}

async function reached(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    throw readable(error);
  }
  if (reply.ok) return reply;
  throw new Refusal(await wordsOf(reply));
}

async function wordsOf(reply) {
  if (reply.status === 401) return "The server wants a key. Reload the page and give it as the password.";
  let words = `The server answered ${reply.status} ${reply.statusText}.`;
  try {
    words = (await reply.json()).error.message;
  } catch {
    // A proxy in between has answered; its status is all there is to say.
  }
  const wait = reply.headers.get("Retry-After");
  return wait ? `${words} It asks to wait ${wait} s.` : words;
}

function readable(error) {
  if (error.name === "AbortError") return error;
  return new Refusal("The server cannot be reached. Is it still running?");
}

/** The data of server-sent events, however the network cuts them. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => Promise.reject(readable(error)));
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
