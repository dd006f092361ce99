// Who shares what: blocks that several sequences hold, as a tree; below them what each has of its own.

import { make, some } from "./dom.js";
import { shortId } from "./requests.js";

const LONGEST_PX = 180;

export class Sharing {
  #drawn = "";
  #frame = null;

  constructor(panel, owners, theme) {
    Object.assign(this, { panel, owners });
    this.list = panel.querySelector(".tree");
    this.note = panel.querySelector("#sharing-note");
    theme.onChange(() => this.#draw());
  }

  // sharing: [level, blocks, sequences, places of their requests in the table], from the top down
  show(frame) {
    this.panel.hidden = frame.sharing.length === 0;
    const ids = frame.requests.map(([id]) => id);
    const now = JSON.stringify([frame.sharing, frame.num_spared, ids]);
    if (now === this.#drawn) return;
    this.#drawn = now;
    this.#frame = { sharing: frame.sharing, ids };
    this.note.textContent = `${some(frame.num_spared, "block")} spared`;
    this.#draw();
  }

  #draw() {
    if (this.#frame === null) return;
    const { sharing, ids } = this.#frame;
    const longest = Math.max(1, ...sharing.map(([, blocks]) => blocks));
    this.list.replaceChildren(...sharing.map((run) => this.#row(run, ids, longest)));
  }

  #row([level, blocks, sequences, holders], ids, longest) {
    const named = holders.filter((place) => place < ids.length).map((place) => ids[place]);
    const words = sequences === 1 ? `${some(blocks, "block")} of ${shortId(named[0] ?? "another request")} alone`
      : `${some(blocks, "block")} shared by ${some(sequences, "sequence")}`;
    const bar = make("span", { className: "length", ariaHidden: "true" });
    bar.style.width = `${Math.round((LONGEST_PX * blocks) / longest)}px`;
    const dots = named.map((id) => make("span", { className: "swatch", title: id }));
    dots.forEach((dot, i) => { dot.style.background = this.owners.of(named[i]); });
    const row = make("li", { role: "treeitem", ariaLevel: String(level + 1) }, bar, words, make("span", { className: "holders" }, ...dots));
    row.style.setProperty("--level", level);
    row.classList.toggle("own", sequences === 1);
    return row;
  }
}
