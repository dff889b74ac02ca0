/* The elements of one message. */

import {button, copyButton, element} from "./dom.js";
import {MarkdownView} from "./markdown.js";

export function userTurn(node, actions, branches) {
  return element("article", {className: "turn user", "aria-label": "You"},
    ...(node.files || []).map(({name, text}) => element("details", {className: "file"},
      element("summary", {textContent: name}), element("pre", {textContent: text, tabIndex: 0}))),
    element("div", {className: "content", textContent: node.content, hidden: !node.content}),
    element("div", {className: "actions"}, branches, copyButton("Copy the message", () => node.content),
      button("Edit", actions.edit, {className: "quiet edit", "aria-label": "Edit the message"})));
}

/* Replaces a user's turn by a field with its text. */
export function editTurn(turn, node, send, cancel) {
  const text = element("textarea", {value: node.content, "aria-label": "Message", rows: 4});
  const form = element("form", {className: "edit-form"}, text,
    element("div", {className: "actions"},
      element("button", {className: "main asks", textContent: "Send as a new branch"}),
      button("Cancel", cancel)));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (text.value.trim() || node.files) send(text.value.trim());
  });
  form.addEventListener("keydown", event => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
  });
  turn.replaceChildren(form);
  text.focus();
}

/* ‹ 1/2 ›, if there are several. */
export function branchPicker(node, siblings, choose) {
  const at = siblings.indexOf(node), box = element("span", {className: "branches"});
  if (siblings.length < 2) return box;
  const step = (sign, label, to) => button(sign, () => choose(siblings[to]),
    {className: "quiet", "aria-label": label, disabled: !siblings[to]});
  box.append(step("‹", "Previous branch", at - 1),
    element("span", {
      textContent: `${at + 1}/${siblings.length}`, role: "img", "aria-label": `branch ${at + 1} of ${siblings.length}`,
    }),
    step("›", "Next branch", at + 1));
  return box;
}

/* An assistant's message, which may still grow: call `refresh` after each change. */
export class AnswerTurn {
  constructor(node, running, actions, branches) {
    this.node = node;
    this.actions = actions;
    this.content = element("div", {className: "content"});
    this.markdown = new MarkdownView(this.content);
    this.thought = element("div");
    this.thinking = element("details", {className: "thinking", hidden: true},
      element("summary", {textContent: "Thinking"}), this.thought);
    this.calls = element("div", {className: "calls"});
    this.foot = element("div", {className: "foot"});
    this.turn = element("article", {className: "turn assistant", "aria-label": "Assistant"},
      this.thinking, this.content, this.calls, this.foot);
    this.branches = branches;
    this.thinking.open = running;
    if (running) {
      this.turn.setAttribute("aria-busy", "true");
      this.waiting = element("span", {className: "waiting", textContent: "…", "aria-hidden": "true"});
      this.foot.append(this.waiting);
      this.refresh();
    } else {
      this.finish();
    }
  }

  /* `progress`: how far the server has read the prompt, while it reads it. */
  refresh(progress) {
    const reading = progress && progress.processed < progress.total;
    const share = reading && Math.floor(100 * progress.processed / progress.total);
    this.waiting.textContent = reading ? `Reading the prompt: ${share}%` : "…";
    this.#showThought();
    this.markdown.grow(this.node.content);
    this.#showCalls(false);
  }

  finish() {
    this.turn.removeAttribute("aria-busy");
    this.#showThought();
    this.markdown.finish(this.node.content);
    this.#showCalls(true);
    const {node} = this;
    this.foot.replaceChildren();
    if (node.full) this.foot.append(this.#wayOn());
    else if (node.error) this.foot.append(element("p", {className: "error", role: "alert", textContent: node.error}));
    const cut = this.actions.isLast && !node.full && !node.calls && (node.content || node.reasoning) &&
      (node.finish === "length" || node.stopped || node.error);
    this.foot.append(element("div", {className: "actions"}, this.branches,
      copyButton("Copy the answer", () => node.content),
      ...(cut ? [button("Continue", this.actions.continue,
        {className: "quiet asks resume", "aria-label": "Continue the answer"})] : []),
      button("Regenerate", this.actions.regenerate,
        {className: "quiet asks regenerate", "aria-label": "Regenerate the answer"}),
      element("span", {className: "usage", textContent: speeds(node)})));
  }

  /* What can be done when the context is full. */
  #wayOn() {
    const can = this.actions.canShorten();
    const text = can
      ? "The context is full: the model has no room for more of this conversation. A new conversation can go on with "
        + "its last messages, up to half of the context. This one stays as it is."
      : "The message is longer than the model's context. Edit it, or attach less.";
    const box = element("div", {className: "full", role: "alert"}, element("p", {textContent: text}));
    if (can) box.append(button("Go on in a new conversation", this.actions.shorten, {className: "asks"}));
    return box;
  }

  /* Appends what is new, so that a long thought stays cheap. */
  #showThought() {
    const text = this.node.reasoning || "";
    this.thinking.hidden = !text;
    const shown = this.thought.textContent.length;
    if (text.length > shown) this.thought.append(text.slice(shown));
    if (this.node.content && this.thinking.open && !this.folded) {
      this.folded = true;
      this.thinking.open = false;
    }
  }

  #showCalls(done) {
    const calls = this.node.calls || [];
    if (!calls.length) return;
    this.calls.replaceChildren(...calls.map(call => this.#call(call, done)));
    if (done) this.calls.append(button("Continue with these results", this.actions.answerResults, {className: "asks continue"}));
  }

  #call(call, done) {
    const head = element("div", {className: "call"},
      element("b", {textContent: call.name}), " ", element("code", {textContent: pretty(call.arguments)}));
    if (!done) return head;
    const result = element("textarea", {value: call.result || "", rows: 2, placeholder: "Result of the call",
      "aria-label": `Result of ${call.name}`});
    result.addEventListener("change", () => { call.result = result.value; this.actions.changed(); });
    return element("div", {className: "call-box"}, head, result);
  }
}

/* Arguments on one line if they are short JSON, else indented. */
function pretty(text) {
  if (text.length <= 80) return text;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const count = new Intl.NumberFormat("en");

/* What an answer cost: tokens, tokens a second, time to the first token. */
function speeds(node) {
  const parts = [], usage = node.usage;
  if (usage && node.seconds !== undefined) {
    const written = usage.completion_tokens, rest = node.seconds - node.first;
    const rate = written > 1 && rest > 0.01 ? ` (${((written - 1) / rest).toFixed(1)} tokens/s)` : "";
    parts.push(`${count.format(written)} ${written === 1 ? "token" : "tokens"} written in ${node.seconds.toFixed(1)} s${rate}`);
  }
  if (node.first !== undefined) parts.push(`first token after ${node.first.toFixed(2)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    parts.push(`prompt ${count.format(usage.prompt_tokens)}` + (cached ? `, ${count.format(cached)} cached` : ""));
  }
  if (node.stopped) parts.push("stopped");
  else if (node.finish === "length") parts.push("ended at the limit of tokens");
  return parts.join(" · ");
}
