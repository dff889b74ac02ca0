/* The list of conversations: search, rename, export, import, delete. */

import {$, announce, button, download, element} from "./dom.js";
import {readText} from "./attachments.js";
import {Conversation} from "./conversation.js";
import {surplus} from "./store.js";

export class Sidebar {
  /* `open(conversation)` shows it; `closed(conversation)` is called before it is deleted;
     `changed(conversation)` after another tab has written in it. */
  constructor(store, open, closed, changed) {
    this.store = store;
    this.open = open;
    this.closed = closed;
    this.changed = changed;
    store.changed = (id, record) => this.#fromOtherTab(id, record);
    this.list = [];
    $("new").addEventListener("click", () => { this.select(Conversation.blank()); $("text").focus(); });
    $("search").addEventListener("input", () => this.draw(true));
    $("rename").addEventListener("click", () => this.#rename());
    $("delete").addEventListener("click", () => this.#delete());
    $("export-markdown").addEventListener("click", () =>
      download(fileName(this.current, "md"), "text/markdown", this.current.markdown()));
    $("export-json").addEventListener("click", () =>
      download(fileName(this.current, "json"), "application/json", JSON.stringify(this.current.record, null, 1)));
    $("export-all").addEventListener("click", () => download("finwhale-conversations.json", "application/json",
      JSON.stringify(this.list.map(one => one.record), null, 1)));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import($("import-file").files[0]));
    $("rename-form").addEventListener("submit", () => {
      this.current.rename($("rename-text").value.trim().slice(0, 200));
      this.save(this.current);
    });
    $("rename-cancel").addEventListener("click", () => $("rename-dialog").close());
  }

  async load() {
    try {
      this.list = (await this.store.all()).map(record => new Conversation(record));
    } catch (error) {
      this.#problem(error);
    }
    if (this.store.problem) this.#problem(this.store.problem);
    this.select(Conversation.blank());
  }

  select(conversation) {
    this.current = conversation;
    this.open(conversation);
    this.draw();
    document.body.classList.remove("sidebar-open");
  }

  async save(conversation) {
    if (conversation.deleted) return;
    if (!this.list.includes(conversation)) this.list.unshift(conversation);
    this.draw();
    try {
      await this.store.save(conversation);
      conversation.size = undefined;
      const old = surplus(this.list);
      for (const one of old) await this.store.remove(one.id);
      if (old.length) {
        this.list = this.list.filter(one => !old.includes(one));
        this.#note(`Removed ${old.length} old conversations to make room.`);
      }
    } catch (error) {
      this.#problem(error);
    }
  }

  draw(tell = false) {
    $("title").textContent = this.current.title;
    document.title = this.current.isEmpty ? "Finwhale" : `${this.current.title} – Finwhale`;
    $("menu-button").disabled = this.current.isEmpty;
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.list.filter(one => one.matches(words)).sort((a, b) => b.record.updated - a.record.updated);
    $("conversations").replaceChildren(...found.map(one => element("li", {},
      button(one.title, () => this.select(one),
        {className: "conversation", title: one.title, ...(one === this.current && {"aria-current": "true"})}))));
    if (!found.length)
      $("conversations").append(element("li",
        {className: "soft", textContent: words.length ? "Nothing found" : "No conversations yet"}));
    if (tell) announce(`${found.length} conversations found`);
  }

  /* Adds the conversations of an exported file. One that is here already takes over what the file has more. */
  async #import(file) {
    $("import-file").value = "";
    try {
      const records = Conversation.imported(await readText(file));
      for (const record of records) {
        const known = this.list.find(one => one.id === record.id);
        if (known) {
          known.merge(record);
          this.changed(known);
        }
        await this.save(known || new Conversation(record));
      }
      this.#note(`Imported ${records.length === 1 ? "a conversation" : `${records.length} conversations`}.`);
    } catch (error) {
      this.#note(`${file.name} is not imported: ${error instanceof SyntaxError ? "it is not JSON" : error.message}.`);
    }
  }

  #rename() {
    $("rename-text").value = this.current.record.title;
    $("menu").hidePopover();
    $("rename-dialog").showModal();
  }

  async #delete() {
    $("menu").hidePopover();
    const {current} = this;
    if (!confirm(`Delete "${current.title}"? This cannot be undone.`)) return;
    this.#forget(current);
    try { await this.store.remove(current.id); } catch (error) { this.#problem(error); }
  }

  #forget(conversation) {
    this.closed(conversation);
    conversation.deleted = true;
    this.list = this.list.filter(one => one !== conversation);
    if (conversation === this.current) this.select(Conversation.blank());
    else this.draw();
  }

  #fromOtherTab(id, record) {
    const known = this.list.find(one => one.id === id);
    if (!record) return known && this.#forget(known);
    if (known) {
      known.merge(record);
      known.size = undefined;
      this.changed(known);
    } else {
      this.list.push(new Conversation(record));
    }
    this.draw();
  }

  #problem(error) {
    this.#note(`The browser does not keep conversations: ${error.message}`);
  }

  #note(text) {
    $("note").textContent = text;
    $("note").hidden = false;
  }
}

function fileName(conversation, ending) {
  const name = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${name.slice(0, 50) || "conversation"}.${ending}`;
}
