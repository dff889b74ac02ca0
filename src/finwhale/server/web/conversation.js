/* A conversation is a tree of messages: an edited question or another answer is a new branch.

   A record is plain data, which the browser keeps:
     {id, title, renamed, created, updated, nodes: {id: node}, chosen: {parent id: child id}}
   A node is {id, parent, role, content}; the first nodes have the parent "". A user's node may have files
   [{name, text}]. An assistant's node also has reasoning, calls [{id, name, arguments, result}], usage,
   finish, seconds, first (seconds to the first token), stopped, error and full (the context had no room). */

const TOKENS_PER_CHARACTER = 0.5; // if no answer says how many tokens the messages have

export class Conversation {
  constructor(record) {
    this.record = record;
    this.written = new Set(); // the nodes that this tab has written
  }

  static blank() {
    const now = Date.now();
    return new Conversation({id: newId(), title: "", created: now, updated: now, nodes: {}, chosen: {}});
  }

  /* The records in an exported file. Throws an error if it is none. */
  static imported(text) {
    const found = [JSON.parse(text)].flat().map(toRecord);
    if (!found.length) throw new Error("it has no conversation");
    return found;
  }

  get id() { return this.record.id; }
  get isEmpty() { return !Object.keys(this.record.nodes).length; }
  get title() { return this.record.title || "New conversation"; }

  /* Adds a message below `parent`, and shows its branch. */
  add(parent, role, content, more = {}) {
    const node = {...more, id: newId(), parent, role, content};
    this.record.nodes[node.id] = node;
    this.record.chosen[parent] = node.id;
    this.written.add(node.id);
    this.record.updated = Date.now();
    if (!this.record.title && role === "user")
      this.record.title = (content || more.files[0].name).trim().replace(/\s+/g, " ").slice(0, 60);
    return node;
  }

  /* The messages with the same parent, oldest first. */
  siblings(node) {
    return Object.values(this.record.nodes).filter(other => other.parent === node.parent);
  }

  rename(title) {
    Object.assign(this.record, {title, renamed: Date.now()});
  }

  /* Takes over what other tabs have written: the browser's record of this conversation. */
  merge(kept) {
    const {record} = this;
    for (const node of Object.values(kept.nodes))
      if (!this.written.has(node.id)) record.nodes[node.id] = Object.assign(record.nodes[node.id] || {}, node);
    record.chosen = {...kept.chosen, ...record.chosen};
    record.updated = Math.max(record.updated, kept.updated);
    if (!record.title || (kept.renamed || 0) > (record.renamed || 0))
      Object.assign(record, {title: kept.title, renamed: kept.renamed});
  }

  choose(node) {
    this.record.chosen[node.parent] = node.id;
  }

  /* The messages of the branch that is shown. */
  path() {
    const found = [];
    for (let id = this.record.chosen[""]; id; id = this.record.chosen[id]) found.push(this.record.nodes[id]);
    return found;
  }

  /* The messages up to `node`, as OpenAI's protocol has them. */
  messages(node, system) {
    const found = [];
    for (; node; node = this.record.nodes[node.parent]) found.unshift(...toMessages(node));
    return system ? [{role: "system", content: system}, ...found] : found;
  }

  /* The tokens of the branch that is shown, as the server counted them at its last answer; 0: not known. */
  get tokens() {
    const usage = this.path().findLast(node => node.usage)?.usage;
    return usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  }

  /* A new conversation with the last messages of this branch, of about `tokens` tokens, from a question on.
     If the last answer alone is longer, only its end is kept. Null: the first question is all that there is. */
  tail(tokens) {
    const path = this.path(), counted = path.slice(0, path.findLastIndex(node => node.usage) + 1);
    const ratio = counted.length ? this.tokens / characters(counted) : TOKENS_PER_CHARACTER;
    const nodes = path.filter(node => node.role === "user" || node.content || node.calls);
    const question = nodes.findLastIndex(node => node.role === "user"), last = nodes.at(-1);
    const room = Math.floor(tokens / ratio) - characters(nodes.slice(question));
    let from = question;
    for (let i = question - 1, left = room; i >= 0 && (left -= characters([nodes[i]])) >= 0; i--)
      if (nodes[i].role === "user") from = i;
    if (!from) from = question; // the whole branch does not fit
    if (!from && last.role === "user") return null;
    const made = Conversation.blank();
    made.record.title = `${this.title.replace(/ \(continued\)$/, "")} (continued)`;
    let parent = "";
    for (const {role, content, calls, files, finish} of nodes.slice(from)) {
      const kept = room < 0 && role === "assistant" ? content.slice(-Math.max(100, content.length + room)) : content;
      parent = made.add(parent, role, kept, {calls, files, finish}).id;
    }
    return made;
  }

  markdown() {
    const parts = this.path().map(node => {
      const lines = [`## ${node.role === "user" ? "You" : "Assistant"}`, ""];
      if (node.reasoning) lines.push("<details><summary>Thinking</summary>", "", node.reasoning, "", "</details>", "");
      for (const {name, text} of node.files || []) lines.push(`<details><summary>${name}</summary>`, "", text, "", "</details>", "");
      if (node.content) lines.push(node.content, "");
      for (const call of node.calls || [])
        lines.push("```json", JSON.stringify({call: call.name, arguments: call.arguments, result: call.result}), "```", "");
      return lines.join("\n");
    });
    return `# ${this.title}\n\n${parts.join("\n")}`;
  }

  /* Whether every word occurs in the title or in a message. */
  matches(words) {
    const contents = Object.values(this.record.nodes).map(node => node.content);
    const text = [this.record.title, ...contents].join("\n").toLowerCase();
    return words.every(word => text.includes(word));
  }
}

/* The dashes keep the order of an object's keys: that in which they were added. */
function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

function toMessages(node) {
  if (node.role === "user") return [{role: "user", content: [...(node.files || []).map(fileText), node.content].join("\n")}];
  const calls = node.calls || [];
  if (!node.content && !calls.length) return [];
  const message = {role: "assistant", content: node.content};
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (calls.length)
    message.tool_calls = calls.map(({id, name, arguments: text}) =>
      ({id, type: "function", function: {name, arguments: text}}));
  return [message, ...calls.map(({id, result}) =>
    ({role: "tool", tool_call_id: id, content: result || "(not carried out)"}))];
}

/* A file as DeepSeek's applications write it into the prompt. */
function fileText({name, text}) {
  return `[file name]: ${name}\n[file content begin]\n${text}\n[file content end]`;
}

function characters(nodes) {
  return JSON.stringify(nodes.map(toMessages)).length;
}

/* The fields of a node beside id, parent, role and content, and what they must be. */
const isText = value => typeof value === "string", isNumber = value => typeof value === "number";
const haveTexts = names => list => Array.isArray(list) && list.every(one => names.every(name => isText(one?.[name])));
const FIELDS = {
  reasoning: isText, finish: isText, error: isText, seconds: isNumber, first: isNumber,
  stopped: value => value === true, full: value => value === true,
  usage: value => isNumber(value?.prompt_tokens) && isNumber(value.completion_tokens),
  files: haveTexts(["name", "text"]), calls: haveTexts(["id", "name", "arguments", "result"]),
};

/* The record of an exported conversation, with nothing in it that the page does not know. */
function toRecord(given) {
  const {id, title, created, updated} = given || {}, nodes = new Map(), chosen = [];
  const times = [created, updated].every(isNumber);
  if (!isText(id) || !isText(title) || !times || !given.nodes || !given.chosen) throw new Error("it is no exported conversation");
  for (const node of Object.values(given.nodes)) {
    const known = [node?.id, node?.parent, node?.content].every(isText) && ["user", "assistant"].includes(node.role);
    if (!known) throw new Error("a message is not complete");
    const more = Object.entries(FIELDS).filter(([name, fits]) => fits(node[name])).map(([name]) => [name, node[name]]);
    nodes.set(node.id, {id: node.id, parent: node.parent, role: node.role, content: node.content, ...Object.fromEntries(more)});
  }
  for (const [parent, child] of Object.entries(given.chosen))
    if (nodes.get(child)?.parent === parent) chosen.push([parent, child]);
  return {id, title, renamed: given.renamed, created, updated, nodes: Object.fromEntries(nodes), chosen: Object.fromEntries(chosen)};
}
