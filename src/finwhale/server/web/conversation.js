/* A conversation is a tree of messages: an edited question or another answer is a new branch.

   A record is plain data, which the browser keeps:
     {id, title, renamed, created, updated, nodes: {id: node}, chosen: {parent id: child id}}
   A node is {id, parent, role, content}; the first nodes have the parent "". An assistant's node also
   has reasoning, calls [{id, name, arguments, result}], usage, finish, seconds, first (seconds to the
   first token), stopped and error. */

export class Conversation {
  constructor(record) {
    this.record = record;
    this.written = new Set(); // the nodes that this tab has written
  }

  static blank() {
    const now = Date.now();
    return new Conversation({id: newId(), title: "", created: now, updated: now, nodes: {}, chosen: {}});
  }

  get id() { return this.record.id; }
  get isEmpty() { return !Object.keys(this.record.nodes).length; }
  get title() { return this.record.title || "New conversation"; }

  /* Adds a message below `parent`, and shows its branch. */
  add(parent, role, content) {
    const node = {id: newId(), parent, role, content};
    this.record.nodes[node.id] = node;
    this.record.chosen[parent] = node.id;
    this.written.add(node.id);
    this.record.updated = Date.now();
    if (!this.record.title && role === "user")
      this.record.title = content.trim().replace(/\s+/g, " ").slice(0, 60);
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

  markdown() {
    const parts = this.path().map(node => {
      const lines = [`## ${node.role === "user" ? "You" : "Assistant"}`, ""];
      if (node.reasoning) lines.push("<details><summary>Thinking</summary>", "", node.reasoning, "", "</details>", "");
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
  if (node.role === "user") return [{role: "user", content: node.content}];
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
