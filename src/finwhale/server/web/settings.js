/* What the user sets. The browser keeps it, except for the key. */

import {$} from "./dom.js";
import {server} from "./server.js";

const PLACE = "finwhale.settings";
const NUMBERS = {
  temperature: "temperature", top_p: "top-p", top_k: "top-k", min_p: "min-p", max_tokens: "tokens", seed: "seed",
  presence_penalty: "presence", frequency_penalty: "frequency", repetition_penalty: "repetition",
};
const TEXTS = ["system", "stop", "effort", "theme", "tools", ...Object.values(NUMBERS)];

export class Settings {
  constructor() {
    let kept = {};
    try { kept = JSON.parse(localStorage.getItem(PLACE)) || {}; } catch { /* begin anew */ }
    for (const id of TEXTS) if (typeof kept[id] === "string") $(id).value = kept[id];
    $("thinking").checked = Boolean(kept.thinking);
    this.tools = parseTools($("tools").value, []);
    for (const id of [...TEXTS, "thinking"]) $(id).addEventListener("change", () => this.#changed());
    $("settings-reset").addEventListener("click", () => {
      for (const id of TEXTS) if (id !== "tools") $(id).value = "";
      this.#changed();
    });
    server.addEventListener("change", () => this.#showDefaults());
    this.#show();
  }

  get system() { return $("system").value.trim(); }

  /* The fields of a request. Empty ones are left to the server. */
  fields() {
    const found = {thinking: {type: $("thinking").checked ? "enabled" : "disabled"}};
    if ($("thinking").checked && $("effort").value) found.reasoning_effort = $("effort").value;
    for (const [field, id] of Object.entries(NUMBERS)) if ($(id).value !== "") found[field] = Number($(id).value);
    const stop = $("stop").value.split("\n").filter(Boolean);
    if (stop.length) found.stop = stop;
    if (this.tools.length) found.tools = this.tools;
    return found;
  }

  /* Takes the text of the tools. Raises an error if it is not a list. */
  takeTools() {
    this.tools = parseTools($("tools").value);
    this.#changed();
  }

  #changed() {
    const kept = {thinking: $("thinking").checked};
    for (const id of TEXTS) kept[id] = $(id).value;
    try { localStorage.setItem(PLACE, JSON.stringify(kept)); } catch { /* it lasts as long as the page */ }
    this.#show();
  }

  #show() {
    $("effort").disabled = !$("thinking").checked;
    $("tools-button").textContent = this.tools.length ? `Tools (${this.tools.length})` : "Tools";
    const theme = $("theme").value;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    document.dispatchEvent(new Event("theme"));
    this.#showDefaults();
  }

  /* Shows what the server takes for a field that is left empty. */
  #showDefaults() {
    const defaults = server.live?.defaults?.[$("thinking").checked ? "enabled" : "disabled"];
    for (const [field, id] of Object.entries(NUMBERS))
      if (defaults?.[field] !== undefined) $(id).placeholder = defaults[field];
  }
}

function parseTools(text, otherwise) {
  try {
    const found = text.trim() ? JSON.parse(text) : [];
    if (!Array.isArray(found)) throw new Error("Write a list of tools.");
    return found;
  } catch (error) {
    if (otherwise) return otherwise;
    throw error;
  }
}
