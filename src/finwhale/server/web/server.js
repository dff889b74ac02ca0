/* The state of the server, which the header, the notice, the composer and the engine view follow. */

import {ask} from "./api.js";

const INTERVAL_MS = 1000;
const PATIENCE_MS = 10_000;

class Server extends EventTarget {
  /* "connecting" before the first answer, "loading", "ready", "gone" (it does not answer, or its engine has
     died) or "key" (it asks for another API key). */
  state = "connecting";
  /* The last answer of /live; null if there is none. */
  live = null;
  /* Of the last answer that there was: the model's name, and the number of tokens of its context. */
  model = "";
  context = 0;

  get ready() { return this.state === "ready"; }

  /* Asks the server once a second while somebody looks at the page. Each answer is a "change". */
  async watch() {
    document.addEventListener("visibilitychange", () => this.poll());
    for (;;) {
      await new Promise(done => setTimeout(done, INTERVAL_MS));
      await this.poll();
    }
  }

  poll() {
    if (document.hidden) return undefined;
    return this.asking ??= this.#ask().finally(() => { this.asking = null; });
  }

  async #ask() {
    try {
      const live = await (await ask("live", {signal: AbortSignal.timeout(PATIENCE_MS)})).json();
      this.live = live;
      this.model = live.model;
      this.context = live.max_model_len || this.context; // 0 while the model loads
      this.state = live.alive ? "ready" : live.loading ? "loading" : "gone";
    } catch (error) {
      this.live = null;
      this.state = error.status === 401 ? "key" : "gone";
    }
    this.dispatchEvent(new Event("change"));
  }

  /* The share of the weights that is read; null if it is not known. */
  get share() {
    const [done, total] = this.live?.loaded_bytes || [0, 0];
    return this.state === "loading" && total ? done / total : null;
  }

  /* What is wrong, in one sentence; "" if nothing is. */
  get problem() {
    const reason = this.live?.reason;
    if (this.state === "key") return "This server needs an API key.";
    if (this.state === "loading")
      return this.share === 1 ? "The weights are loaded, the model is being prepared." : "The model is loading.";
    if (this.state === "gone") return `${reason ? `The server has a problem: ${reason}.` : "The server does not answer."} Trying again …`;
    return reason ? `The server has a problem: ${reason}.` : "";
  }
}

export const server = new Server();
