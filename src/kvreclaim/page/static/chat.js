// The conversation: what is typed, sent, streamed, stopped, tried again and kept.

import { Budget } from "./budget.js";
import { complete } from "./completion.js";
import { Conversation } from "./conversation.js";
import { make } from "./dom.js";
import * as history from "./history.js";
import { Turn, inWords, isSend } from "./turn.js";

const SAVE_MS = 1000;
const NEAR_PX = 60; // so far from the end the text is followed
const CUT = { length: "the context or the pool is full", abort: "the server shut down" };
const SETTINGS = ["system", "temperature", "max_tokens", "policy"];

export class Chat {
  #settings = null; // of the server
  #kept = history.load();
  #conversation;
  #turns = []; // drawn
  #running = null; // {index, turn, abort, id, drawn: whether a frame will draw it}

  // announce(words): for those who do not see the panel
  constructor(page, announce) {
    this.announce = announce;
    const part = (name) => page.querySelector(`#chat-${name}`);
    this.part = part;
    this.list = part("turns");
    this.message = part("message");
    this.fields = Object.fromEntries(SETTINGS.map((name) => [name, part(name.replace("_", "-"))]));
    this.budget = new Budget(part("budget"), part("budget-words"), part("budget-reset"), (value) => this.#set("budget", value));
    for (const [name, field] of Object.entries(this.fields)) {
      field.addEventListener("change", () => this.#set(name, field.type === "number" && field.value ? Number(field.value) : field.value));
      field.addEventListener("invalid", () => { field.closest("details").open = true; });
    }
    part("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.message.addEventListener("keydown", (event) => {
      if (!isSend(event)) return;
      event.preventDefault();
      part("form").requestSubmit();
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.#running?.abort.abort(); });
    part("stop").addEventListener("click", () => this.#running?.abort.abort());
    part("choice").addEventListener("change", (event) => this.#open(this.#kept.find(({ id }) => id === event.target.value)));
    part("new").addEventListener("click", () => this.#open(this.#conversation.next()));
    part("delete").addEventListener("click", () => this.#delete());
    part("export").addEventListener("click", () => this.#export());
    addEventListener("pagehide", () => {
      if (!this.#running) return;
      this.#conversation.messages[this.#running.index].note = "The page was closed before the answer ended.";
      this.#save();
    });
    this.#open(this.#kept[0] ?? new Conversation(), false);
  }

  // What the server offers.
  offer(settings) {
    this.#settings = settings;
    const best = settings.policies.includes(settings.default_policy) ? settings.default_policy : settings.policies[0];
    this.fields.policy.replaceChildren(new Option(`${best} (default)`, ""), ...settings.policies.filter((name) => name !== best).map((name) => new Option(name)));
    this.fields.policy.value = this.#conversation.policy;
    this.default = best;
    this.budget.offer(settings);
    this.#ready();
  }

  // A sentence below the conversation; "" takes it away.
  complain(words) {
    this.part("problem").textContent = words;
    this.part("problem").hidden = !words;
  }

  // What the pool knows of the answer while it is written.
  watch(frame, owners) {
    const running = this.#running;
    const request = frame.requests.find(([id]) => id === running?.id);
    if (!request) return;
    const [id, logical, , blocks, , freed] = request;
    this.#count(this.#conversation.messages[running.index], { total: logical, blocks, freed });
    running.turn.run(true, owners.of(id));
    this.#draw();
  }

  #count(message, found) {
    const { block_size: size, block_bytes, full_block_bytes } = this.#settings;
    message.figures = { tokens: 0, seconds: 0, blocks: null, freed: 0, block_bytes, ...message.figures, ...found };
    message.figures.full_bytes = Math.ceil(message.figures.total / size) * full_block_bytes;
  }

  #set(name, value) {
    this.#conversation[name] = value;
    if (this.#conversation.messages.length) this.#save();
  }

  #save() {
    const conversation = this.#conversation;
    conversation.changed = Date.now();
    if (!this.#kept.includes(conversation)) this.#kept.unshift(conversation);
    this.complain(history.save(conversation));
    this.#list();
  }

  #list() {
    const shown = this.#kept.includes(this.#conversation) ? this.#kept : [this.#conversation, ...this.#kept];
    this.part("choice").replaceChildren(...shown.map(({ title, id }) => new Option(title, id)));
    this.part("choice").value = this.#conversation.id;
  }

  #open(conversation, isFocused = true) {
    this.#conversation = conversation;
    for (const [name, field] of Object.entries(this.fields)) field.value = conversation[name];
    this.budget.value = conversation.budget;
    this.#list();
    this.#drawAll();
    if (isFocused) this.message.focus();
  }

  #delete() {
    if (this.#conversation.messages.length && !confirm(`Delete "${this.#conversation.title}"? This cannot be undone.`)) return;
    history.remove(this.#conversation);
    this.#kept = this.#kept.filter((kept) => kept !== this.#conversation);
    this.announce("Conversation deleted.");
    this.#open(this.#kept[0] ?? this.#conversation.next());
  }

  #export() {
    const file = history.exported(this.#conversation);
    const href = URL.createObjectURL(file);
    make("a", { href, download: file.name }).click();
    setTimeout(() => URL.revokeObjectURL(href), SAVE_MS);
  }

  #drawAll() {
    const conversation = this.#conversation;
    this.#turns = conversation.path().map((index) => {
      const versions = conversation.versions(index), message = conversation.messages[index];
      return new Turn(message, [versions.indexOf(index), versions.length], {
        turn: (by) => this.#turn(index, by),
        retry: () => this.#retry(index),
        edit: (text) => this.#say(text, message.parent),
      });
    });
    this.list.replaceChildren(...this.#turns.map((turn) => turn.element));
    this.part("empty").hidden = this.#turns.length > 0;
    this.list.scrollTop = this.list.scrollHeight;
    this.#ready();
  }

  #turn(index, by) {
    const place = this.#conversation.path().indexOf(index);
    this.#conversation.turn(index, by);
    this.#save();
    this.#drawAll();
    this.#turns[place].element.scrollIntoView({ block: "nearest" });
    const buttons = [...this.#turns[place].bar.querySelectorAll("button:not(:disabled)")];
    (buttons.find((own) => own.textContent === (by < 0 ? "‹" : "›")) ?? buttons[0]).focus();
  }

  // What can be used while an answer is written, and while none is.
  #ready() {
    const isRunning = this.#running !== null;
    this.part("send").disabled = isRunning || this.#settings === null;
    this.part("stop").disabled = !isRunning;
    for (const name of ["choice", "new", "delete", "export"]) this.part(name).disabled = isRunning;
    for (const { bar } of this.#turns) bar.inert = isRunning;
  }

  #send() {
    const text = this.message.value.trim();
    if (text && this.#say(text, this.#conversation.leaf)) this.message.value = "";
  }

  // Returns whether it was sent.
  #say(text, parent) {
    if (this.#running || this.#settings === null) return false;
    this.#answer(this.#conversation.add("user", text, parent));
    return true;
  }

  // Another version of an answer; one that never began is replaced.
  #retry(index) {
    const { text, reasoning, parent } = this.#conversation.messages[index];
    if (this.#settings !== null) this.#answer(parent, text || reasoning ? null : index);
  }

  async #answer(parent, index = null) {
    const conversation = this.#conversation;
    index ??= conversation.add("assistant", "", parent);
    const message = conversation.messages[index];
    Object.assign(message, { note: "", figures: null });
    this.#drawAll();
    const turn = this.#turns[conversation.path().indexOf(index)], abort = new AbortController();
    this.#running = { index, turn, abort, id: null, drawn: false };
    turn.run(true);
    this.#follow(turn);
    this.#ready();
    this.message.focus();
    this.#save();
    try {
      await this.#stream(message, this.#body(parent), abort.signal);
    } catch (error) {
      message.note = error.name === "AbortError" ? "Stopped." : sentence(error.message);
    }
    if (document.activeElement === this.part("stop")) this.message.focus(); // it is about to be disabled
    this.#running = null;
    turn.run(false);
    this.#follow(turn);
    this.#save();
    this.#ready();
    const words = message.figures ? inWords(message.figures).map((part) => part.textContent ?? part).join("") : "";
    this.announce(`${message.text} ${message.note} ${words}`);
  }

  #body(parent) {
    const { temperature, max_tokens } = this.#conversation;
    return {
      model: this.#settings.models[0],
      messages: this.#conversation.request(parent),
      temperature,
      ...(max_tokens && { max_tokens }),
      ...(temperature > 0 && { top_p: 0.9, top_k: 40 }), // as in `kvreclaim run`
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...this.budget.request(this.fields.policy.value || this.default),
    };
  }

  async #stream(message, body, signal) {
    let began = null, saved = performance.now();
    for await (const part of complete(body, signal, (id) => { this.#running.id = id; })) {
      const now = performance.now();
      began ??= now;
      message.text += part.text;
      message.reasoning += part.reasoning;
      const why = part.reason === "length" && body.max_tokens ? `max tokens is ${body.max_tokens}` : CUT[part.reason];
      if (why) message.note = `The answer was cut off: ${why}.`;
      if (part.usage) this.#count(message, counted(part.usage, (now - began) / 1000));
      if (now - saved > SAVE_MS) {
        saved = now;
        this.#save();
      }
      this.#draw();
    }
  }

  // At most once a frame.
  #draw() {
    const running = this.#running;
    if (running.drawn) return;
    running.drawn = true;
    requestAnimationFrame(() => {
      running.drawn = false;
      this.#follow(running.turn);
    });
  }

  // Draw the answer, and stay at its end if the end is in sight.
  #follow(turn) {
    const { list } = this;
    const isNear = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_PX;
    turn.show();
    if (isNear) list.scrollTop = list.scrollHeight;
  }
}

const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}`;

function counted({ completion_tokens: tokens, total_tokens: total, kv_cache: cache }, seconds) {
  return { tokens, total, seconds, ...(cache && { blocks: cache.final_blocks, freed: cache.blocks_freed }) };
}
