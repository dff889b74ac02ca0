/* Conversations in the browser's IndexedDB, which all tabs share. */

// The browser keeps this much; beyond it the oldest conversations go.
const MAX_CONVERSATIONS = 300;
const MAX_CHARACTERS = 32 << 20;

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class Store {
  /* `changed(id, record)` is called when another tab has saved a record, or removed it (null). */
  changed = () => {};

  /* Opens the store. Without IndexedDB (some private windows), conversations last as long as the page. */
  static async open() {
    const store = new Store();
    try {
      const opening = indexedDB.open("finwhale", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", {keyPath: "id"});
      store.database = await result(opening);
      store.tabs = new BroadcastChannel("finwhale-conversations");
      store.tabs.onmessage = async ({data: id}) =>
        store.changed(id, await result(store.#table("readonly").get(id)) || null);
    } catch (error) {
      store.problem = error;
    }
    return store;
  }

  #table(mode) {
    return this.database.transaction("conversations", mode).objectStore("conversations");
  }

  /* All records, newest first. */
  async all() {
    const found = this.database ? await result(this.#table("readonly").getAll()) : [];
    return found.sort((a, b) => b.updated - a.updated);
  }

  /* Saves a conversation together with what other tabs have written in it. */
  async save(conversation) {
    if (!this.database) return;
    const table = this.#table("readwrite");
    const kept = await result(table.get(conversation.id));
    if (kept) conversation.merge(kept);
    await result(table.put(conversation.record));
    this.tabs.postMessage(conversation.id);
  }

  async remove(id) {
    if (!this.database) return;
    await result(this.#table("readwrite").delete(id));
    this.tabs.postMessage(id);
  }
}

/* Of conversations, those that no longer fit: the oldest. */
export function surplus(conversations) {
  const sorted = [...conversations].sort((a, b) => b.record.updated - a.record.updated);
  let characters = 0;
  return sorted.filter((one, i) => {
    characters += one.size ??= JSON.stringify(one.record).length;
    return i > 0 && (i >= MAX_CONVERSATIONS || characters > MAX_CHARACTERS);
  });
}
