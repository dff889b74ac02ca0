/* The page at /. */

import {$} from "./dom.js";
import {Chat} from "./chat.js";
import {EngineView} from "./engine.js";
import {server} from "./server.js";
import {Settings} from "./settings.js";
import {Sidebar} from "./sidebar.js";
import {showStatus} from "./status.js";
import {Store} from "./store.js";

function showView(name) {
  for (const view of ["chat", "engine"]) {
    $(`${view}-view`).hidden = view !== name;
    $(`${view}-tab`).setAttribute("aria-pressed", String(view === name));
  }
  engine.show(name === "engine");
}

const settings = new Settings();
const store = await Store.open();
const chat = new Chat(settings, conversation => sidebar.save(conversation), conversation => sidebar.select(conversation));
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
$("sidebar-button").addEventListener("click", () => {
  const wide = matchMedia("(min-width: 50rem)").matches;
  document.body.classList.toggle(wide ? "sidebar-closed" : "sidebar-open");
});
$("shade").addEventListener("click", () => document.body.classList.remove("sidebar-open"));
document.addEventListener("keydown", event => {
  if (event.key === "Escape") document.body.classList.remove("sidebar-open");
});

showStatus();
await sidebar.load();
$("text").focus();
await server.poll();
server.watch();
document.documentElement.dataset.ready = "true";
