/* The conversation on the screen, and the answers that are being written. */

import {$, announce, button, element} from "./dom.js";
import {chat} from "./api.js";
import {AnswerTurn, branchPicker, editTurn, userTurn} from "./turns.js";

const SAVE_INTERVAL_MS = 2000;

export class Chat {
  /* `model()` resolves to the model's name; `save(conversation)` keeps it. */
  constructor(settings, model, save) {
    this.settings = settings;
    this.model = model;
    this.save = save;
    this.conversation = null;
    this.runs = new Map();
    $("form").addEventListener("submit", event => {
      event.preventDefault();
      this.#submit();
    });
    $("text").addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.#run) this.#submit();
      }
    });
    document.addEventListener("keydown", event => {
      if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) this.stop();
    });
  }

  get #run() { return this.runs.get(this.conversation.id); }

  show(conversation) {
    this.conversation = conversation;
    this.#draw();
    $("talk").scrollTop = $("talk").scrollHeight;
  }

  /* Draws a conversation that has changed, unless somebody edits a message of it. */
  refresh(conversation) {
    if (this.conversation === conversation && !$("talk").querySelector(".edit-form, :focus")) this.#draw();
  }

  stop(conversation = this.conversation) {
    this.runs.get(conversation.id)?.controller.abort();
  }

  #submit() {
    if (this.#run) return this.stop();
    const text = $("text").value.trim();
    if (!text) return;
    $("text").value = "";
    this.#ask(this.conversation.path().at(-1)?.id || "", text);
  }

  #ask(parent, text) {
    const node = this.conversation.add(parent, "user", text);
    this.#answer(node.id);
  }

  #draw() {
    const {conversation} = this, run = this.#run;
    const turns = conversation.path().map(node => {
      const branches = branchPicker(node, conversation.siblings(node), other => {
        if (this.#run) return;
        conversation.choose(other);
        this.save(conversation);
        this.#draw();
      });
      if (node.role === "user") return this.#userTurn(node, branches);
      const turn = new AnswerTurn(node, run?.node === node, this.#actions(node), branches);
      if (run?.node === node) run.turn = turn;
      return turn.turn;
    });
    $("talk").replaceChildren(...(turns.length ? turns : [welcome(text => this.#ask("", text))]));
    this.#showSend();
  }

  #userTurn(node, branches) {
    const turn = userTurn(node, {edit: () => {
      if (this.#run) return;
      editTurn(turn, node, text => this.#ask(node.parent, text), () => this.#draw());
    }}, branches);
    return turn;
  }

  #actions(node) {
    return {
      regenerate: () => { if (!this.#run) this.#answer(node.parent); },
      continue: () => { if (!this.#run) this.#answer(node.id); },
      changed: () => {
        this.conversation.written.add(node.id);
        this.save(this.conversation);
      },
    };
  }

  #showSend() {
    $("send").textContent = this.#run ? "Stop" : "Send";
    $("send").classList.toggle("stop", Boolean(this.#run));
  }

  /* Writes an answer below the node `parent`. It goes on when the user looks at another conversation. */
  async #answer(parent) {
    const {conversation} = this, controller = new AbortController();
    const messages = conversation.messages(conversation.record.nodes[parent], this.settings.system);
    const node = conversation.add(parent, "assistant", "");
    const run = {controller, node, turn: null};
    this.runs.set(conversation.id, run);
    this.show(conversation);
    this.save(conversation);
    announce("The answer begins");
    const begin = performance.now(), seconds = () => (performance.now() - begin) / 1000;
    let saved = begin;
    try {
      const body = {model: await this.model(), messages, stream: true, stream_options: {include_usage: true},
        return_progress: true,
        ...this.settings.fields()};
      for await (const chunk of chat(body, controller.signal)) {
        if (take(node, chunk)) node.first ??= seconds();
        run.progress = chunk.prompt_progress;
        this.#grow(conversation, run);
        if (performance.now() - saved > SAVE_INTERVAL_MS) {
          saved = performance.now();
          this.save(conversation);
        }
      }
    } catch (error) {
      if (controller.signal.aborted) node.stopped = true;
      else node.error = error.message;
    }
    node.seconds = seconds();
    this.runs.delete(conversation.id);
    conversation.record.updated = Date.now();
    this.save(conversation);
    if (this.conversation === conversation) {
      const atEnd = isAtEnd();
      run.turn.finish();
      this.#showSend();
      if (atEnd) $("talk").scrollTop = $("talk").scrollHeight;
      announce(node.error ? "" : node.stopped ? "Stopped" : `The answer is complete. ${node.content.slice(0, 500)}`);
    }
  }

  #grow(conversation, run) {
    if (this.conversation !== conversation || run.drawing) return;
    run.drawing = true;
    setTimeout(() => {
      run.drawing = false;
      if (this.conversation !== conversation || this.#run !== run) return;
      const atEnd = isAtEnd();
      run.turn.refresh(run.progress);
      if (atEnd) $("talk").scrollTop = $("talk").scrollHeight;
    }, 40);
  }
}

function isAtEnd() {
  const talk = $("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
}

/* Adds a chunk to an assistant's node; returns whether it had output. */
function take(node, chunk) {
  let any = false;
  if (chunk.usage) node.usage = chunk.usage;
  for (const choice of chunk.choices || []) {
    const delta = choice.delta || {};
    if (delta.reasoning_content) node.reasoning = (node.reasoning || "") + delta.reasoning_content;
    if (delta.content) node.content += delta.content;
    for (const part of delta.tool_calls || []) {
      node.calls ??= [];
      const call = node.calls[part.index] ??= {id: part.id, name: "", arguments: "", result: ""};
      call.name += part.function?.name || "";
      call.arguments += part.function?.arguments || "";
    }
    any ||= Boolean(delta.reasoning_content || delta.content || delta.tool_calls);
    node.finish = choice.finish_reason || node.finish;
  }
  return any;
}

const EXAMPLES = [
  "What is the capital of France?", "Write a short story about a whale.", "Explain what a prefix cache does.",
];

function welcome(ask) {
  return element("div", {className: "welcome"},
    element("h2", {textContent: "What would you like to ask?"}),
    element("p", {textContent:
      "Conversations stay in this browser. Enter sends, Shift+Enter starts a new line, Escape stops."}),
    element("div", {className: "examples"}, ...EXAMPLES.map(text => button(text, () => ask(text)))));
}
