/* The page at /. */

import {$} from "./dom.js";
import {apiKey, ask} from "./api.js";
import {Chat} from "./chat.js";
import {EngineView} from "./engine.js";
import {Settings} from "./settings.js";
import {Sidebar} from "./sidebar.js";
import {Store} from "./store.js";

let model = null;

async function modelName() {
  if (model) return model;
  try {
    const found = (await (await ask("v1/models")).json()).data[0];
    model = found.id;
    $("model").textContent = model;
    $("model").title = `${found.max_model_len ?? "?"} tokens of context`;
    return model;
  } catch (error) {
    $("model").textContent = error.status === 401 ? "an API key is needed" : "no model";
    if (error.status === 401 && !$("settings-dialog").open) {
      $("settings-dialog").showModal();
      $("key").focus();
    }
    throw error;
  }
}

function showView(name) {
  for (const view of ["chat", "engine"]) {
    $(`${view}-view`).hidden = view !== name;
    $(`${view}-tab`).setAttribute("aria-pressed", String(view === name));
  }
  engine.show(name === "engine");
}

const settings = new Settings();
const store = await Store.open();
const chat = new Chat(settings, modelName, conversation => sidebar.save(conversation));
const sidebar = new Sidebar(store, conversation => { chat.show(conversation); showView("chat"); },
  conversation => chat.stop(conversation), conversation => chat.refresh(conversation));
const engine = new EngineView();

$("chat-tab").addEventListener("click", () => showView("chat"));
$("engine-tab").addEventListener("click", () => showView("engine"));
$("settings-button").addEventListener("click", () => $("settings-dialog").showModal());
$("settings-close").addEventListener("click", () => $("settings-dialog").close());
$("tools-button").addEventListener("click", () => $("tools-dialog").showModal());
$("tools-close").addEventListener("click", () => {
  try {
    settings.takeTools();
    $("tools-error").textContent = "";
    $("tools-dialog").close();
  } catch (error) {
    $("tools-error").textContent = error.message;
  }
});
$("tools-example").addEventListener("click", () => {
  $("tools").value = JSON.stringify([{type: "function", function: {name: "weather",
    description: "The weather of a place", parameters: {type: "object",
    properties: {city: {type: "string"}, days: {type: "integer"}}, required: ["city"]}}}], null, 2);
});
$("key").addEventListener("change", () => {
  apiKey.set($("key").value.trim());
  model = null;
  modelName().catch(() => {});
});
$("sidebar-button").addEventListener("click", () => {
  const wide = matchMedia("(min-width: 50rem)").matches;
  document.body.classList.toggle(wide ? "sidebar-closed" : "sidebar-open");
});
$("shade").addEventListener("click", () => document.body.classList.remove("sidebar-open"));
document.addEventListener("keydown", event => {
  if (event.key === "Escape") document.body.classList.remove("sidebar-open");
});

await sidebar.load();
modelName().catch(() => {});
$("text").focus();
document.documentElement.dataset.ready = "true";
