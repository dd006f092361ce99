// The running requests and the latest compactions, as a table and a list.

import { make, whole } from "./dom.js";

const COLUMNS = ["number", "number", "number", "number wide", "number"]; // logical, physical, blocks, evicted, freed
const MAX_ROWS = 60, MAX_PASSES = 5;

export const shortId = (id) => (id.length > 14 ? `${id.slice(0, 12)}…` : id);

export class Requests {
  #rows = new Map();
  #chosen = null;

  // onChoose(id or null): a row was chosen, to be shown in the pool
  constructor(page, owners, theme, onChoose) {
    Object.assign(this, { owners, onChoose });
    this.body = page.querySelector("#requests tbody");
    this.empty = page.querySelector("#requests-empty");
    this.total = page.querySelector("#requests-count");
    this.passes = page.querySelector("#passes");
    this.noPasses = page.querySelector("#passes-empty");
    theme.onChange(() => this.#paint());
  }

  show(frame) {
    const shown = frame.requests.slice(0, MAX_ROWS);
    const ids = new Set(shown.map(([id]) => id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      this.#rows.delete(id);
      if (this.#chosen === id) this.#choose(null);
    }
    for (const request of shown) this.#row(request[0]).fill(request);
    this.#paint();
    const waiting = frame.num_waiting ? `, ${whole(frame.num_waiting)} waiting` : "";
    const hidden = frame.num_owners > shown.length ? `, the first ${shown.length} shown` : "";
    const words = frame.num_owners ? `${whole(frame.num_owners)} running${waiting}${hidden}` : `none${waiting}`;
    if (this.total.textContent !== words) this.total.textContent = words;
    this.empty.hidden = shown.length > 0;
  }

  // passes: [request id, blocks before, after, blocks freed, tokens evicted]
  compacted(passes) {
    for (const [id, before, after, freed, evicted] of passes.slice(-MAX_PASSES)) {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = this.owners.of(id);
      const item = make("li", { title: id }, swatch, make("code", { textContent: shortId(id) }));
      item.append(`${whole(before)} → ${whole(after)} blocks, ${whole(evicted)} tokens evicted`);
      item.append(make("strong", { textContent: `${whole(freed)} freed` }));
      this.passes.prepend(item);
    }
    while (this.passes.children.length > MAX_PASSES) this.passes.lastElementChild.remove();
    this.noPasses.hidden = true;
  }

  #row(id) {
    let row = this.#rows.get(id);
    if (!row) {
      row = new Row(id, () => this.#choose(this.#chosen === id ? null : id));
      this.#rows.set(id, row);
      this.body.append(row.element);
    }
    return row;
  }

  #choose(id) {
    this.#chosen = id;
    for (const [other, row] of this.#rows) row.press(other === id);
    this.onChoose(id);
  }

  #paint() {
    for (const [id, row] of this.#rows) row.paint(this.owners.of(id));
  }
}

class Row {
  constructor(id, onPress) {
    this.swatch = make("span", { className: "swatch" });
    this.button = make("button", { type: "button", className: "who", title: `${id}: show its blocks` }, this.swatch, shortId(id));
    this.button.setAttribute("aria-pressed", "false");
    this.button.setAttribute("aria-label", `${id}: show its blocks`);
    this.button.addEventListener("click", onPress);
    this.fillBar = make("span");
    this.numbers = COLUMNS.map((className) => make("td", { className }));
    this.bar = make("span", { className: "bar" }, this.fillBar);
    this.bar.setAttribute("aria-hidden", "true");
    this.promise = make("small", { className: "wide" });
    this.element = make("tr", {}, make("td", {}, this.button, this.promise, this.bar), ...this.numbers);
  }

  fill([, logical, physical, blocks, evicted, freed, promise]) {
    if (this.promise.textContent !== promise) this.promise.textContent = promise;
    [logical, physical, blocks, evicted, freed].forEach((number, i) => {
      const words = whole(number);
      if (this.numbers[i].textContent !== words) this.numbers[i].textContent = words;
    });
    this.fillBar.style.width = `${logical ? (100 * physical) / logical : 0}%`;
  }

  press(on) {
    this.button.setAttribute("aria-pressed", String(on));
  }

  paint(colour) {
    this.swatch.style.background = this.fillBar.style.background = colour;
  }
}
