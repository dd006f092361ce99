// The slider of the KV budget: bytes of one conversation's cache, up to the whole of a full context.

import { bytes, percent, whole } from "./dom.js";

const LEAST = 256; // tokens per KV head; sinks and recent tokens take 132 of them
const STEPS = 2; // per doubling

export class Budget {
  #settings = null;
  #steps = []; // tokens; the last step keeps all
  #value = null;

  // onChange(value): tokens, "full", or null for the server's own setting
  constructor(slider, output, reset, onChange) {
    Object.assign(this, { slider, output, reset });
    slider.addEventListener("input", () => {
      this.value = this.#steps[slider.value] ?? "full";
      onChange(this.value);
    });
    reset.addEventListener("click", () => {
      this.value = null;
      slider.focus();
      onChange(null);
    });
  }

  // settings: of /page/settings
  offer(settings) {
    this.#settings = settings;
    const num = settings.max_model_len > LEAST ? Math.ceil(STEPS * Math.log2(settings.max_model_len / LEAST)) : 0;
    const { block_size: size } = settings;
    this.#steps = Array.from({ length: num }, (_, i) => size * Math.round((LEAST * 2 ** (i / STEPS)) / size));
    this.slider.max = num;
    this.slider.disabled = !settings.client_kv_compression || num === 0;
    this.value = this.#value;
  }

  get value() {
    return this.#value;
  }

  set value(value) {
    this.#value = value;
    if (this.#settings === null) return;
    const { default_policy: own, default_budget: budget } = this.#settings;
    const tokens = value ?? budget ?? "full";
    const at = this.#steps.findIndex((step) => step >= tokens);
    this.slider.value = tokens === "full" || at < 0 ? this.#steps.length : at;
    this.reset.hidden = value === null || own === null;
    this.output.textContent = value === null && own !== null ? this.#serversOwn() : this.#words(tokens);
    this.slider.setAttribute("aria-valuetext", this.output.textContent);
  }

  // The request's own kv_compression; none while the server's holds.
  request(policy) {
    if (this.#value === null) return {};
    return { kv_compression: this.#value === "full" ? { policy: "full" } : { policy, budget: this.#value } };
  }

  #serversOwn() {
    const { default_policy: policy, default_words: words, default_budget: tokens, client_kv_compression: mayChange } = this.#settings;
    const held = tokens === null ? "" : `${bytes(this.#held(tokens))}: `;
    return `${held}as the server, ${policy}, ${words}${mayChange ? "" : "; only the operator may change it"}`;
  }

  #held(tokens) {
    return (tokens * this.#settings.block_bytes) / this.#settings.block_size;
  }

  #words(tokens) {
    const { max_model_len: most, block_size: size, full_block_bytes: full } = this.#settings;
    if (tokens === "full") return `all, up to ${bytes(this.#held(most))}`;
    const held = this.#held(tokens);
    return `${bytes(held)}: ${whole(tokens)} tokens, ${percent(held / ((most * full) / size))} of a full context`;
  }
}
