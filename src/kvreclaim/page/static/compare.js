// One prompt, sent twice: with a compression policy and with the full cache.

import { complete } from "./completion.js";
import { make, whole } from "./dom.js";

export class Compare {
  #panes;
  #chat = false; // whether prompts go through a chat template
  #example = null; // {prompt, answer}: what the box was filled with
  #examples = null; // of the server
  #solved = new Map(); // example -> the answer with the full cache, where that is right, else null
  #next = 0;
  #abort = null; // of the trial of an example
  #running = 0;

  // announce(words): for those who do not see the panes
  constructor(page, announce) {
    this.announce = announce;
    this.fields = Object.fromEntries(
      ["prompt", "policy", "budget", "recent", "interval", "max-tokens", "temperature", "model-choice"]
        .map((id) => [id, page.querySelector(`#${id}`)]),
    );
    this.note = page.querySelector("#example-note");
    this.send = page.querySelector("#send");
    this.stop = page.querySelector("#stop");
    const template = page.querySelector("#pane");
    this.#panes = ["compressed", "full"].map((id) => new Pane(page.querySelector(`#${id}`), template, announce));
    page.querySelector("#form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendBoth();
    });
    this.stop.addEventListener("click", () => {
      this.#abort?.abort();
      this.#panes.forEach((pane) => pane.stop());
    });
    this.load = page.querySelector("#example");
    this.load.addEventListener("click", () => this.#loadExample());
  }

  // What the server offers.
  offer({ models, policies, default_policy: own, chat }) {
    this.#chat = chat;
    fill(this.fields["model-choice"], models);
    document.querySelector("#model-field").hidden = models.length < 2;
    fill(this.fields.policy, policies.includes(own ?? policies[0]) ? policies : [own, ...policies]);
    if (own) this.fields.policy.value = own;
  }

  // What the pool knows of the two requests while they run.
  watch(frame, owners) {
    for (const pane of this.#panes) pane.watch(frame, owners);
  }

  // The next example that the model solves with its full cache.
  async #loadExample() {
    this.#setRunning(1);
    try {
      this.#examples ??= await fetchExamples();
      for (let tried = 0; tried < this.#examples.length; tried += 1) {
        const example = this.#examples[this.#next++ % this.#examples.length];
        const answer = await this.#solve(example);
        if (answer === null) continue;
        this.#example = { prompt: example.prompt, answer };
        this.fields.prompt.value = example.prompt;
        this.fields.budget.value = example.budget;
        this.fields["max-tokens"].value = example.max_tokens;
        return this.#tell(`Example: ${example.title}`);
      }
      this.#tell("No example: this model solves none of them with its full cache.");
    } catch (error) {
      this.#tell(error.name === "AbortError" ? "stopped" : `No example: ${error.message}`);
    } finally {
      this.#setRunning(0);
    }
  }

  // The right answer; null if the model does not find it. A text for any model is put to it first.
  async #solve(example) {
    if (example.answer) return example.answer;
    if (!this.#solved.has(example)) {
      this.#tell(`Trying with the full cache: ${example.title}`);
      this.#abort = new AbortController();
      const body = { ...this.#body(example.prompt), max_tokens: example.max_tokens, temperature: 0, kv_compression: { policy: "full" } };
      let text = "";
      try {
        for await (const part of complete({ ...body, cache_salt: "page example" }, this.#abort.signal)) text += part.reasoning + part.text;
      } catch (error) {
        if (error.name === "AbortError") throw error; // else the prompt is too long for this server
      }
      this.#solved.set(example, text.includes(example.contains) ? text : null);
    }
    return this.#solved.get(example);
  }

  #tell(words) {
    this.note.textContent = words;
    this.announce(words);
  }

  #body(prompt) {
    return {
      model: this.fields["model-choice"].value,
      ...(this.#chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }

  async #sendBoth() {
    const number = (name) => Number(this.fields[name].value);
    const prompt = this.fields.prompt.value;
    const known = this.#example?.prompt === prompt ? this.#example.answer : null;
    const body = { ...this.#body(prompt), max_tokens: number("max-tokens"), temperature: number("temperature") };
    const compression = {
      policy: this.fields.policy.value,
      budget: number("budget"),
      recent: number("recent"),
      interval: number("interval"),
    };
    this.#setRunning(2);
    // Of blocks that both held, compression could give none back while the other runs: they share no prefix.
    await Promise.all([compression, { policy: "full" }].map(async (kv_compression, i) => {
      await this.#panes[i].run({ ...body, kv_compression, cache_salt: `page pane ${i}` }, known);
      this.#setRunning(this.#running - 1);
    }));
  }

  #setRunning(number) {
    this.#running = number;
    this.send.disabled = this.load.disabled = number > 0;
    this.stop.disabled = number === 0;
  }
}

async function fetchExamples() {
  const response = await fetch("/page/examples");
  if (!response.ok) throw new Error(`the server answered ${response.status}.`);
  return response.json();
}

function fill(select, options) {
  select.replaceChildren(...options.map((name) => new Option(name, name)));
}

class Pane {
  #abort = null;
  #id = null; // of the running request
  #peak = 0;

  constructor(element, template, announce) {
    element.append(template.content.cloneNode(true));
    const title = element.querySelector("h3");
    this.name = title.textContent;
    this.swatch = make("span", { className: "swatch", hidden: true });
    title.prepend(this.swatch);
    this.announce = announce;
    this.part = (name) => element.querySelector(`[data-${name}]`);
    this.answer = this.part("answer");
    this.answer.setAttribute("aria-label", `Answer, ${this.name.toLowerCase()}`);
    this.part("stop").setAttribute("aria-label", `Stop, ${this.name.toLowerCase()}`);
    this.part("stop").addEventListener("click", () => this.stop());
  }

  stop() {
    this.#abort?.abort();
  }

  watch(frame, owners) {
    const request = frame.requests.find(([id]) => id === this.#id);
    this.swatch.hidden = !request;
    if (!request) return;
    const [id, , , blocks, , freed] = request;
    this.#peak = Math.max(this.#peak, blocks);
    this.swatch.style.background = owners.of(id);
    this.part("peak").textContent = whole(this.#peak);
    this.part("freed").textContent = whole(freed);
  }

  // known: the right answer, null if there is none
  async run(body, known) {
    this.#abort = new AbortController();
    this.part("stop").disabled = false;
    this.#reset(known);
    const began = performance.now();
    let text = "", reason = null, usage = null;
    try {
      for await (const part of complete(body, this.#abort.signal, (id) => this.#started(id))) {
        text += part.reasoning + part.text;
        reason = part.reason ?? reason;
        usage = part.usage ?? usage;
        this.#show(text, known);
        if (usage) this.#count(usage, began);
      }
      this.#say(`finished (${reason})`);
    } catch (error) {
      if (error.name === "AbortError") this.#say("stopped");
      else this.#say(error.message, true);
    }
    this.#id = null;
    this.part("stop").disabled = true;
    this.announce(`${this.name}: ${this.part("state").textContent}, ${this.part("tokens").textContent} tokens, `
      + `${this.part("peak").textContent} blocks at most, ${this.part("freed").textContent} freed.`);
  }

  #reset(known) {
    this.answer.replaceChildren();
    for (const name of ["tokens", "rate", "peak", "final", "freed", "cached", "right"]) this.part(name).textContent = "–";
    this.part("right-field").hidden = known === null;
    this.#say("sent");
  }

  #started(id) {
    this.#id = id;
    this.#peak = 0;
    this.#say(`${id} runs`);
  }

  #say(words, bad = false) {
    this.part("state").textContent = words;
    this.part("state").classList.toggle("error", bad);
  }

  #count(usage, began) {
    this.part("tokens").textContent = whole(usage.completion_tokens);
    this.part("rate").textContent = whole(usage.completion_tokens / ((performance.now() - began) / 1000));
    this.part("cached").textContent = whole(usage.prompt_tokens_details?.cached_tokens ?? 0);
    const cache = usage.kv_cache;
    if (!cache) return;
    this.part("peak").textContent = whole(cache.peak_blocks);
    this.part("final").textContent = whole(cache.final_blocks);
    this.part("freed").textContent = whole(cache.blocks_freed);
  }

  // What is known to be wrong, from the first wrong word on, is marked.
  #show(text, known) {
    const atEnd = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 30;
    if (known === null) {
      this.answer.textContent = text;
    } else {
      const right = rightPrefix(text, known);
      const off = make("span", { className: "off", textContent: text.slice(right.length) });
      this.answer.replaceChildren(text.slice(0, right.length), ...(off.textContent ? [off] : []));
      this.part("right").textContent = `${whole(right.words)} of ${whole(known.trim().split(/\s+/).length)}`;
    }
    if (atEnd) this.answer.scrollTop = this.answer.scrollHeight;
  }
}

// How far a text agrees with the known answer: {length in characters, words}. A last word that is still
// growing agrees while it begins like the known one.
function rightPrefix(text, known) {
  const expected = known.trim().split(/\s+/);
  let words = 0, length = 0;
  for (const match of text.matchAll(/\S+/g)) {
    const end = match.index + match[0].length;
    const whole = match[0] === expected[words];
    if (!whole && !(end === text.length && expected[words]?.startsWith(match[0]))) break;
    words += whole;
    length = end;
  }
  return { length, words };
}
