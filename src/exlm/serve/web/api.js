// Requests to the server: its models, its state, and answers as they are streamed. Every failure becomes an
// ApiError, whose message is shown to the user.

/** The server refused a request or could not be reached. */
export class ApiError extends Error {}

/** The registered models. */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** The cache pages, queue and batch of every model now. */
export async function state(signal) {
  return (await request("v1/internal/state", { signal })).json();
}

/** The events of a streamed answer, until it is complete. */
export async function* streamAnswer(body, signal) {
  const reply = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
  }
  throw new ApiError("The answer broke off: the connection to the server was lost.");
}

async function request(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    throw toApiError(error);
  }
  if (reply.ok) return reply;
  throw new ApiError(await errorMessage(reply));
}

async function errorMessage(reply) {
  if (reply.status === 401) return "The server wants a key. Reload the page and give it as the password.";
  let message = `The server answered ${reply.status} ${reply.statusText}.`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // The reply is a proxy's, which has no error object.
  }
  const wait = reply.headers.get("Retry-After");
  return wait ? `${message} It asks to wait ${wait} s.` : message;
}

function toApiError(error) {
  if (error.name === "AbortError") return error;
  return new ApiError("The server cannot be reached. Is it still running?");
}

/** The data of server-sent events, however the network cuts them. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => Promise.reject(toApiError(error)));
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
