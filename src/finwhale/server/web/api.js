/* Requests to this server. */

const KEY = "finwhale.key";
const MAX_BUFFER = 1 << 24;

/* The key stays in this tab's session. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: key => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ServerError extends Error {
  /* `status` is 0 if there was no answer; `code` is OpenAI's. */
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function ask(path, options = {}) {
  const headers = {"content-type": "application/json"};
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  let reply;
  try {
    reply = await fetch(path, {...options, headers});
  } catch {
    throw new ServerError("The server does not answer.", 0);
  }
  if (reply.ok) return reply;
  const error = (await reply.json().catch(() => ({}))).error || {message: `The server answers with status ${reply.status}.`};
  const message = reply.status === 401 ? "The server needs another API key." : error.message;
  throw new ServerError(message, reply.status, error.code);
}

/* The chunks of a streamed answer. */
export async function* chat(body, signal) {
  const reply = await ask("v1/chat/completions", {method: "POST", body: JSON.stringify(body), signal});
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  const broken = new ServerError("The connection to the server broke before the answer was complete.", 0);
  for (;;) {
    const {value, done} = await reader.read().catch(() => { throw broken; });
    if (done) throw broken;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (rest.length > MAX_BUFFER) throw new ServerError("the server sent an event without an end", 0);
    for (const event of events) {
      const line = event.split("\n").find(text => text.startsWith("data: "));
      if (!line) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ServerError(chunk.error.message, 0, chunk.error.code);
      yield chunk;
    }
  }
}
