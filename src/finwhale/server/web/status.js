/* Shows the server's state: the header, the notice below it, and the dialog that asks for an API key. */

import {$, announce} from "./dom.js";
import {apiKey} from "./api.js";
import {server} from "./server.js";

const WORDS = {connecting: "connecting", ready: "ready", gone: "no answer", key: "an API key is needed"};
let shown = "connecting";

export function showStatus() {
  server.addEventListener("change", show);
  $("notice-button").addEventListener("click", () => (server.state === "key" ? askForKey() : server.poll()));
  $("key-button").addEventListener("click", askForKey);
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("key-form").addEventListener("submit", event => {
    event.preventDefault();
    useKey($("key").value.trim());
  });
}

function show() {
  const {state, live, share, problem} = server, before = shown;
  shown = state;
  $("model").textContent = server.model || "…";
  $("model").title = [server.model, server.context && `${server.context} tokens of context`].filter(Boolean).join(", ");
  const percent = share === null ? "" : `, ${Math.floor(100 * share)}%`;
  setText("state", WORDS[state] || `loading${percent}`);
  $("state").classList.toggle("bad", state === "gone" || state === "key");
  setText("load", state === "ready"
    ? `${live.tokens_per_second.toFixed(0)} tokens/s · ${live.running} running · ${live.waiting} waiting` : "");
  $("notice").hidden = !problem;
  setText("notice-text", problem + (state === "loading" ? percent.replace(",", "") : ""));
  $("notice-progress").hidden = state !== "loading";
  if (share === null) $("notice-progress").removeAttribute("value");
  else $("notice-progress").value = share;
  $("notice-button").hidden = state !== "gone" && state !== "key";
  setText("notice-button", state === "key" ? "Enter the key" : "Retry");
  if (state === before) return;
  announce(problem || (before === "connecting" ? "" : "The server is ready."));
  if (state === "key") askForKey();
}

function askForKey() {
  if ($("key-dialog").open) return;
  $("key").value = apiKey.get();
  setText("key-why", `${server.state === "key" ? "This server answers only those who have a key." : "Some servers need a key."} `
    + "Whoever runs the server can give you one. The page forgets it when you close the tab.");
  setText("key-error", server.state === "key" && apiKey.get() ? "The server does not accept the key below." : "");
  $("key-dialog").showModal();
  $("key").focus();
}

async function useKey(key) {
  apiKey.set(key);
  await server.asking; // with the key before
  await server.poll();
  if (server.state === "key") setText("key-error", "The server does not accept this key.");
  else $("key-dialog").close();
}

function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}
