/* The conversation on the screen, and the answers that are being written. */

import {$, announce, button, element} from "./dom.js";
import {chat} from "./api.js";
import {Attachments} from "./attachments.js";
import {server} from "./server.js";
import {AnswerTurn, branchPicker, editTurn, userTurn} from "./turns.js";

const SAVE_INTERVAL_MS = 2000;

export class Chat {
  /* `save(conversation)` keeps it; `open(conversation)` shows it. */
  constructor(settings, save, open) {
    this.settings = settings;
    this.save = save;
    this.open = open;
    this.attachments = new Attachments();
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
    server.addEventListener("change", () => this.#showControls());
  }

  get #run() { return this.runs.get(this.conversation?.id); }
  get #canAsk() { return server.ready && !this.#run; }

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
    const text = $("text").value.trim(), {files} = this.attachments;
    if (!server.ready || !(text || files.length)) return;
    $("text").value = "";
    this.#ask(this.conversation.path().at(-1)?.id || "", text, this.attachments.take());
  }

  #ask(parent, text, files = []) {
    const node = this.conversation.add(parent, "user", text, files.length ? {files} : {});
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
    this.#showControls();
  }

  #userTurn(node, branches) {
    const turn = userTurn(node, {edit: () => {
      if (this.#run) return;
      editTurn(turn, node, text => this.#ask(node.parent, text, node.files), () => this.#draw());
      this.#showControls();
    }}, branches);
    return turn;
  }

  #actions(node) {
    return {
      isLast: node === this.conversation.path().at(-1),
      regenerate: () => { if (this.#canAsk) this.#answer(node.parent); },
      answerResults: () => { if (this.#canAsk) this.#answer(node.id); },
      continue: () => { if (this.#canAsk) this.#continue(node); },
      canShorten: () => Boolean(this.conversation.tail(server.context / 2)),
      shorten: () => this.#openTail(this.conversation.tail(server.context / 2)),
      changed: () => {
        this.conversation.written.add(node.id);
        this.save(this.conversation);
      },
    };
  }

  /* What can be clicked now, and how much of the context is used. */
  #showControls() {
    const run = this.#run;
    $("send").textContent = run ? "Stop" : "Send";
    $("send").classList.toggle("stop", Boolean(run));
    $("send").disabled = !run && !server.ready;
    for (const one of $("talk").querySelectorAll(".asks")) one.disabled = !this.#canAsk;
    const used = this.conversation?.tokens, {context} = server;
    $("context").hidden = !used || !context;
    if ($("context").hidden) return;
    Object.assign($("context-meter"), {max: context, low: 0.8 * context, high: 0.9 * context, optimum: 0, value: used});
    $("context-text").textContent = `${count.format(used)} of ${count.format(context)} tokens`;
  }

  /* Writes an answer below the node `parent`. It goes on when the user looks at another conversation. */
  async #answer(parent) {
    const {conversation} = this;
    const messages = conversation.messages(conversation.record.nodes[parent], this.settings.system);
    await this.#write(conversation.add(parent, "assistant", ""), messages);
  }

  /* Lets the model go on with an answer that has ended early. */
  async #continue(node) {
    const {conversation} = this;
    const messages = conversation.messages(conversation.record.nodes[node.parent], this.settings.system);
    messages.push({role: "assistant", content: node.content, ...(node.reasoning && {reasoning_content: node.reasoning})});
    for (const name of ["finish", "stopped", "error", "full"]) delete node[name];
    await this.#write(node, messages, {
      continue_final_message: true, thinking: {type: node.reasoning ? "enabled" : "disabled"},
      ...(!node.reasoning && {reasoning_effort: undefined}),
    });
  }

  /* Goes on in a new conversation with the last messages of a full one. */
  #openTail(conversation) {
    this.open(conversation);
    this.save(conversation);
    const last = conversation.path().at(-1);
    if (last.role === "user") this.#answer(last.id);
  }

  /* Lets the model write to the end of a node; `more` are fields of the request. */
  async #write(node, messages, more) {
    const {conversation} = this, controller = new AbortController();
    const run = {controller, node, turn: null}, {usage, seconds: spent = 0} = node;
    conversation.written.add(node.id);
    this.runs.set(conversation.id, run);
    this.show(conversation);
    this.save(conversation);
    announce("The answer begins");
    const begin = performance.now(), seconds = () => spent + (performance.now() - begin) / 1000;
    let saved = begin;
    try {
      const body = {model: server.model, messages, stream: true,
        stream_options: {include_usage: true, continuous_usage_stats: true}, return_progress: true,
        ...this.settings.fields(), ...more};
      for await (const chunk of chat(body, controller.signal)) {
        if (take(node, chunk)) node.first ??= seconds();
        if (chunk.usage && usage) node.usage = sum(usage, chunk.usage);
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
      if (!controller.signal.aborted && (error.status === 0 || error.status === 401)) server.poll();
      if (error.code === "context_length_exceeded") node.full = true;
    }
    if (node.finish === "length" && server.context && conversation.tokens >= server.context) node.full = true;
    node.seconds = seconds();
    this.runs.delete(conversation.id);
    conversation.record.updated = Date.now();
    this.save(conversation);
    if (this.conversation === conversation) {
      const atEnd = isAtEnd();
      run.turn.finish();
      this.#showControls();
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
      this.#showControls();
      if (atEnd) $("talk").scrollTop = $("talk").scrollHeight;
    }, 40);
  }
}

function isAtEnd() {
  const talk = $("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
}

const count = new Intl.NumberFormat("en");

/* The usage of an answer and of its continuation, whose prompt has the answer. */
function sum(before, now) {
  return {...before, completion_tokens: before.completion_tokens + now.completion_tokens};
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
    element("div", {className: "examples"}, ...EXAMPLES.map(text => button(text, () => ask(text), {className: "asks"}))));
}
