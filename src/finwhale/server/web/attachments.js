/* Text files that go with the next message. */

import {$, button, element} from "./dom.js";

const MAX_BYTES = 16 << 20;

export class Attachments {
  constructor() {
    this.files = [];
    $("attach").addEventListener("click", () => $("attach-files").click());
    $("attach-files").addEventListener("change", () => this.#add([...$("attach-files").files]));
  }

  /* The files {name, text}, which are attached no longer. */
  take() {
    const {files} = this;
    this.files = [];
    this.#show();
    return files;
  }

  async #add(chosen) {
    $("attach-files").value = "";
    const problems = [];
    for (const file of chosen) {
      try {
        this.files.push({name: file.name, text: await readText(file)});
      } catch (error) {
        problems.push(`${file.name} is not attached: ${error.message}.`);
      }
    }
    this.#show(problems.join(" "));
    $("text").focus();
  }

  #show(problem = "") {
    $("attach-error").textContent = problem;
    $("attached").hidden = !this.files.length;
    $("attached").replaceChildren(...this.files.map(file => element("li", {}, file.name,
      button("×", () => { this.files = this.files.filter(one => one !== file); this.#show(); },
        {className: "quiet", "aria-label": `Remove ${file.name}`}))));
  }
}

export async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error("it is too large");
  const text = await file.arrayBuffer().then(bytes => new TextDecoder("utf-8", {fatal: true}).decode(bytes))
    .catch(() => { throw new Error("it is not text (UTF-8)"); });
  if (text.includes("\0")) throw new Error("it is not text (UTF-8)");
  return text;
}
