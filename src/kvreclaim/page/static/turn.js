// One message of the conversation, drawn: text, versions, what may be done with it, and what its cache took.

import { copyButton } from "./clipboard.js";
import { button, bytes, make, percent, some, whole } from "./dom.js";
import { Markdown } from "./markdown.js";

export class Turn {
  #message;
  #actions;
  #editor = null;

  // versions: [place of this one, how many]; actions: turn(by), retry(), edit(text)
  constructor(message, versions, actions) {
    this.#message = message;
    this.#actions = actions;
    const isAnswer = message.role === "assistant";
    this.swatch = make("span", { className: "swatch", hidden: true, ariaHidden: "true" });
    this.text = make("div", { className: "text" });
    this.markdown = isAnswer ? new Markdown(this.text) : null;
    this.reasoning = make("details", { hidden: true }, make("summary", { textContent: "Reasoning" }), make("p"));
    this.note = make("p", { className: "error", hidden: true });
    this.figures = make("p", { className: "note", hidden: true });
    this.bar = make("div", { className: "buttons" }, ...this.#versionButtons(versions), copyButton("Copy the message", () => message.text),
      isAnswer ? button("Retry", () => actions.retry(), { className: "quiet", title: "Another answer, by the budget that is set now" })
        : button("Edit", () => this.#edit(), { className: "quiet" }));
    this.element = make("li", { className: message.role }, make("h3", {}, this.swatch, isAnswer ? "Answer" : "You"),
      this.reasoning, this.text, this.note, this.figures, this.bar);
    this.show();
  }

  #versionButtons([place, all]) {
    if (all < 2) return [];
    const step = (textContent, by, title, disabled) =>
      button(textContent, () => this.#actions.turn(by), { className: "quiet", title, ariaLabel: title, disabled });
    return [step("‹", -1, "Earlier version", place === 0), make("span", { className: "note", textContent: `${place + 1} / ${all}` }),
      step("›", 1, "Later version", place === all - 1)];
  }

  // Draw what the message holds now.
  show() {
    const { text, reasoning, note, figures } = this.#message;
    if (this.markdown) this.markdown.show(text);
    else this.text.textContent = text;
    this.reasoning.hidden = !reasoning;
    this.reasoning.lastElementChild.textContent = reasoning;
    this.note.hidden = !note;
    this.note.textContent = note;
    const isWaiting = !figures && this.element.ariaBusy === "true";
    this.figures.hidden = !figures && !isWaiting;
    this.figures.replaceChildren(...(figures ? inWords(figures) : ["The prompt is being computed."]));
  }

  // Whether the answer is being written; colour: of its blocks in the pool.
  run(isRunning, colour = null) {
    this.element.ariaBusy = String(isRunning);
    this.swatch.hidden = !isRunning || colour === null;
    if (colour !== null) this.swatch.style.background = colour;
  }

  #edit() {
    const box = make("textarea", { value: this.#message.text, rows: 3, ariaLabel: "Edit the message" });
    const send = () => { if (box.value.trim()) this.#actions.edit(box.value.trim()); };
    const close = () => {
      this.#editor.replaceWith(this.text, this.note, this.figures, this.bar);
      this.bar.querySelector("button:last-child").focus();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (!isSend(event)) return;
      else send();
      event.preventDefault();
      event.stopPropagation();
    });
    this.#editor = make("div", { className: "editor" }, box,
      make("div", { className: "buttons" }, button("Send", send, { className: "primary" }), button("Cancel", close)));
    for (const part of [this.note, this.figures, this.bar]) part.remove();
    this.text.replaceWith(this.#editor);
    box.focus();
  }
}

// Enter alone; not the one that ends a word of an input method.
export const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

// What an answer took; blocks is null as long as the server has not sent it.
export function inWords({ tokens, seconds, total, blocks, freed, block_bytes: own, full_bytes: full }) {
  const rate = seconds > 0 && tokens > 1 ? `, ${(tokens / seconds).toFixed(1)} per second` : "";
  const words = [`${some(tokens, "token")}${rate}. `];
  if (blocks === null) return words;
  const held = blocks * own;
  words.push(make("strong", { textContent: freed ? `Compression freed ${some(freed, "block")}, ${bytes(freed * own)}. ` : "Nothing freed. " }));
  words.push(`${some(blocks, "block")}, ${bytes(held)}, ${blocks === 1 ? "holds" : "hold"} ${whole(total)} tokens`
    + `${full ? `: ${percent(held / full)} of the full cache` : ""}.`);
  return words;
}
