// A button that copies a text.

import { button, make } from "./dom.js";

const SHOWN_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", { value: text, className: "hidden" }); // over plain HTTP from another machine
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  if (!isCopied) throw new Error("the browser refused.");
}

// textOf(): what is copied when the button is pressed
export function copyButton(name, textOf) {
  const own = button("Copy", async () => {
    own.textContent = await copy(textOf()).then(() => "Copied", () => "Not copied");
    own.focus();
    setTimeout(() => { own.textContent = "Copy"; }, SHOWN_MS);
  }, { title: name, className: "quiet" });
  return own;
}
