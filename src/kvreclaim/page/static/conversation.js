// One conversation: a tree of messages, of which a path is shown. An edited message and another answer are new
// branches, so nothing is lost.

const TITLE = 48; // letters

export class Conversation {
  // kept: what toJSON gave, or settings of the last conversation
  constructor(kept = {}) {
    const own = { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, changed: Date.now() };
    Object.assign(this, { ...own, system: "", temperature: 0.8, max_tokens: "", policy: "", budget: null, messages: [], leaf: null, ...kept });
  }

  // Another one with the same settings.
  next() {
    const { system, temperature, max_tokens, policy, budget } = this;
    return new Conversation({ system, temperature, max_tokens, policy, budget });
  }

  get title() {
    const first = this.messages[0]?.text.trim().split("\n")[0] ?? "";
    return first.length > TITLE ? `${first.slice(0, TITLE)}…` : first || "New conversation";
  }

  // parent: index of a message, null for the first. Returns the index of the new one, the end of the path.
  add(role, text, parent) {
    this.messages.push({ role, text, parent, reasoning: "", note: "", figures: null });
    this.leaf = this.messages.length - 1;
    return this.leaf;
  }

  // Indices of the messages from the first to the end of the path.
  path(leaf = this.leaf) {
    const found = [];
    for (let at = leaf; at !== null; at = this.messages[at].parent) found.unshift(at);
    return found;
  }

  // Indices of the versions of a message, itself among them.
  versions(index) {
    const { parent } = this.messages[index];
    return [...this.messages.keys()].filter((other) => this.messages[other].parent === parent);
  }

  // Show another version of a message, with the last that followed it.
  turn(index, by) {
    const versions = this.versions(index);
    const chosen = versions[versions.indexOf(index) + by];
    this.leaf = [...this.messages.keys()].findLast((other) => this.path(other).includes(chosen));
  }

  // The messages up to an index, as the API takes them: an empty answer is none, and neighbours of one role are one.
  request(leaf) {
    const found = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    for (const index of this.path(leaf)) {
      const { role, text, reasoning } = this.messages[index];
      const last = found.at(-1);
      if (last?.role === role) last.content += `\n\n${text}`;
      else if (text || role === "user") found.push({ role, content: text, ...(reasoning && { reasoning_content: reasoning }) });
    }
    return found;
  }
}
