/* Requests to this server. */

const KEY = "finwhale.key";
const MAX_BUFFER = 1 << 24;

/* The key stays in this tab's session. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: key => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const headers = {"content-type": "application/json"};
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  const reply = await fetch(path, {...options, headers});
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new ServerError(body.error?.message || `status ${reply.status}`, reply.status);
  }
  return reply;
}

/* The chunks of a streamed answer. */
export async function* chat(body, signal) {
  const reply = await ask("v1/chat/completions", {method: "POST", body: JSON.stringify(body), signal});
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (rest.length > MAX_BUFFER) throw new ServerError("the server sent an event without an end", 0);
    for (const event of events) {
      const line = event.split("\n").find(text => text.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ServerError(chunk.error.message, 0);
      yield chunk;
    }
  }
}
