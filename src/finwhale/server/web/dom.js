/* Small helpers for the document. */

export const $ = id => document.getElementById(id);

/* A new element. `properties` are set on it; those with a dash are attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties))
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  made.append(...children);
  return made;
}

export function button(text, action, properties = {}) {
  const made = element("button", {type: "button", textContent: text, ...properties});
  made.addEventListener("click", action);
  return made;
}

/* Tells a screen reader; nothing changes on the screen. */
export function announce(text) {
  $("announce").textContent = text;
}

/* A button that copies what `text()` returns, and says so for a moment. */
export function copyButton(label, text) {
  const made = button("Copy", async () => {
    try {
      await copy(text());
      made.textContent = "Copied";
      announce("Copied");
    } catch {
      made.textContent = "Not copied";
    }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  }, {className: "quiet copy", "aria-label": label});
  return made;
}

/* The clipboard's own interface exists only on HTTPS and localhost. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element("textarea", {value: text, className: "unseen"});
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  if (!copied) throw new Error("the browser refused");
}

export function download(name, type, text) {
  const link = element("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
