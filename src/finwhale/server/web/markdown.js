/* Markdown to elements. Nothing that a model or a user writes becomes HTML: raw HTML is shown as text,
   and DOMPurify removes all but the tags and attributes below. */

import {Marked} from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import temml from "./vendor/temml.js";
import {copyButton, element} from "./dom.js";

// Longer blocks are shown as plain text, and longer code without colours: their parsers take too long.
const MAX_BLOCK = 100_000;
const MAX_CODE = 30_000;
const MAX_MATH = 4_000;
// Markdown that nests deeper would need too much of the stack.
const MAX_DEPTH = 50;

const MATH = `math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover
  munderover mmultiscripts mprescripts mtable mtr mtd mstyle mpadded mphantom menclose merror`;
const TAGS = `a b strong em i del code pre p br hr blockquote ul ol li h1 h2 h3 h4 h5 h6 table thead
  tbody tr th td span div input sup sub`;
const ATTRIBUTES = `href title class align start type checked disabled display xmlns mathvariant
  stretchy fence separator form lspace rspace minsize maxsize symmetric largeop movablelimits accent
  accentunder linethickness columnalign columnspacing rowspacing columnlines rowlines displaystyle
  scriptlevel width height depth voffset notation colspan rowspan intent data-style`;
const STYLES = /^(?:text-align|vertical-align|color|(?:padding|border)(?:-[a-z]+){0,2})$/;
const CLEAN = {
  ALLOWED_TAGS: words(`${TAGS} ${MATH}`),
  ALLOWED_ATTR: words(ATTRIBUTES),
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$))/i,
  RETURN_DOM_FRAGMENT: true,
};

function words(text) {
  return text.split(/\s+/);
}

function escaped(text) {
  return text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);
}

function math(text, displayMode) {
  if (text.length > MAX_MATH) return escaped(text);
  const made = temml.renderToString(text, {displayMode, trust: false, maxSize: [20, 20], maxExpand: 500});
  return made.replaceAll(' style="', ' data-style="');
}

/* The page's policy allows styles that a script sets, but none in HTML: so set those of formulas. */
function applyStyles(root) {
  for (const node of root.querySelectorAll("[data-style]")) {
    for (const [, name, value] of node.dataset.style.matchAll(/([\w-]+)\s*:\s*([\w\s.%#-]{1,60})(?:;|$)/g))
      if (STYLES.test(name)) node.style.setProperty(name, value);
    delete node.dataset.style;
  }
}

/* An extension of marked for one way to write LaTeX. */
function mathRule(name, level, pattern, displayMode) {
  return {
    name,
    level,
    start: source => {
      const found = source.search(displayMode ? /\$\$|\\\[/ : /\$|\\\(/);
      return found < 0 ? undefined : found;
    },
    tokenizer(source) {
      const match = pattern.exec(source);
      if (match) return {type: name, raw: match[0], text: (match[1] ?? match[2]).trim()};
    },
    renderer: token => (level === "block" ? `<p>${math(token.text, displayMode)}</p>` : math(token.text, displayMode)),
  };
}

const DISPLAY = /^(?:\$\$([^$]{1,4000}?)\$\$|\\\[([^]{1,4000}?)\\\])/;
const INLINE = /^(?:\$(?![\s$])([^$\n]{0,500}?[^\s$\\])\$(?!\d)|\\\(([^\n]{1,500}?)\\\))/;

const markdown = new Marked({
  gfm: true,
  extensions: [
    mathRule("displayBlock", "block", new RegExp(DISPLAY.source + "[ \\t]*(?:\\n|$)"), true),
    mathRule("display", "inline", DISPLAY, true),
    mathRule("formula", "inline", INLINE, false),
  ],
  renderer: {
    html: token => escaped(token.text),
    code: ({text, lang}) => {
      const language = /^[\w+#.-]{1,30}/.exec(lang || "")?.[0] || "";
      return `<pre><code class="language-${escaped(language)}">${escaped(text)}</code></pre>\n`;
    },
    link({href, tokens}) {
      const text = this.parser.parseInline(tokens);
      return /^(?:https?:\/\/|mailto:)/i.test(href) ? `<a href="${escaped(href)}">${text}</a>` : text;
    },
    // An image would tell its host that the answer was read.
    image: ({href, text}) =>
      /^https?:\/\//i.test(href) ? `<a href="${escaped(href)}">${escaped(text || href)}</a>` : escaped(text),
  },
});

/* The elements of blocks of marked's. */
function elements(tokens, highlight) {
  const raw = tokens.map(token => token.raw).join("");
  let made;
  try {
    made = DOMPurify.sanitize(markdown.parser(tokens), CLEAN);
  } catch {
    return plain(raw);
  }
  applyStyles(made);
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const box of made.querySelectorAll("input")) box.setAttribute("aria-label", "task");
  for (const table of made.querySelectorAll("table")) {
    const frame = scrolled("div", "table", "table");
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of made.querySelectorAll("pre > code")) frameCode(code, highlight);
  return made;
}

/* What is wider than the screen scrolls by itself, also by keyboard. */
function scrolled(tag, className, label) {
  return element(tag, {className, tabIndex: 0, role: "region", "aria-label": label});
}

function frameCode(code, highlight) {
  const text = code.textContent, language = code.className.replace("language-", "");
  if (highlight && hljs.getLanguage(language) && text.length <= MAX_CODE)
    code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, {language}).value, CLEAN));
  const pre = code.parentElement, frame = element("div", {className: "code"});
  pre.replaceWith(frame);
  const label = language ? `${language} code` : "code";
  const scroller = scrolled("pre", "", label);
  scroller.append(code);
  frame.append(
    element("div", {className: "bar"},
      element("span", {textContent: language}), copyButton(`Copy ${label}`, () => text)),
    scroller,
  );
}

function plain(text) {
  return element("p", {className: "plain", textContent: text});
}

/* The blocks of a text: marked's tokens, or null if the text must stay plain. */
function blocks(text) {
  if (text.length > MAX_BLOCK || tooDeep(text)) return null;
  try {
    return markdown.lexer(text);
  } catch {
    return null;
  }
}

function tooDeep(text) {
  return new RegExp(`^[ \\t]*(?:(?:>|[-*+]|\\d+[.)])[ \\t]*){${MAX_DEPTH}}`, "m").test(text) ||
    new RegExp(`[\\[*_~]{${MAX_DEPTH * 4}}`).test(text);
}

/* Shows a text that grows. Only its last block is made again, at most ten times a second. */
export class MarkdownView {
  constructor(box) {
    this.box = box;
    this.text = "";
    this.settled = 0;
    this.last = [];
    this.pause = 100;
    this.timer = 0;
  }

  /* Shows the text soon. It must begin with the text of the call before. */
  grow(text) {
    this.text = text.replaceAll("\r", "");
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      const begin = performance.now();
      this.#show(false);
      this.pause = Math.max(100, 5 * (performance.now() - begin));
    }, this.pause);
  }

  /* Shows a whole text now. */
  finish(text) {
    clearTimeout(this.timer);
    this.timer = 0;
    this.text = text.replaceAll("\r", "");
    this.settled = 0;
    this.last = [];
    this.box.replaceChildren();
    this.#show(true);
  }

  #show(whole) {
    const rest = this.text.slice(this.settled), tokens = blocks(rest);
    for (const node of this.last) node.remove();
    if (tokens === null) {
      this.last = [plain(rest)];
    } else {
      let count = tokens.length;
      if (!whole) while (count && tokens[--count].type === "space");
      const done = tokens.slice(0, count);
      this.box.append(elements(done, true));
      this.settled += done.reduce((sum, token) => sum + token.raw.length, 0);
      const made = elements(tokens.slice(count), false);
      this.last = made instanceof DocumentFragment ? [...made.childNodes] : [made];
    }
    this.box.append(...this.last);
  }
}
