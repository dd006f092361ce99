// Device, host and disk: what their slots hold, what moves between them, and where hits lay.

import { Rate } from "./charts.js";
import { bytes, make, whole } from "./dom.js";

const WINDOW_S = 2;
const NAMES = { device: "device (the pool)", host: "host memory", disk: "disk" };

class Row {
  #up = new Rate(WINDOW_S);
  #down = new Rate(WINDOW_S);

  constructor(body, name) {
    const row = body.insertRow();
    row.append(make("th", { scope: "row", textContent: NAMES[name] }));
    this.parts = ["in-use", "cached"].map((className) => make("span", { className }));
    this.bar = make("div", { className: "slots", ariaHidden: "true" }, ...this.parts);
    row.insertCell().append(this.bar);
    this.cells = Array.from({ length: 6 }, () => {
      const cell = row.insertCell();
      cell.className = "number";
      return cell;
    });
  }

  // slots: in use, cached, free; down, up: bytes since the start, null for the device
  show(time, slots, hits, down, up) {
    const all = slots.reduce((sum, part) => sum + part, 0);
    this.parts.forEach((part, i) => { part.style.width = `${(100 * slots[i]) / Math.max(1, all)}%`; });
    const rate = (counter, total) => {
      if (total === null) return "";
      const [increase, seconds] = counter.add(time, total);
      return bytes(seconds > 0 ? increase / seconds : 0);
    };
    const words = [...slots.map(whole), whole(hits), rate(this.#down, down), rate(this.#up, up)];
    this.cells.forEach((cell, i) => { if (cell.textContent !== words[i]) cell.textContent = words[i]; });
  }
}

export class Tiers {
  #rows = {};

  constructor(panel) {
    this.panel = panel;
    this.body = panel.querySelector("tbody");
    this.note = panel.querySelector("#tiers-parked");
  }

  show({ tiers, blocks, at_s: time }) {
    this.panel.hidden = tiers === null;
    if (tiers === null) return;
    const device = [blocks.in_use + blocks.shared, blocks.cached + blocks.pinned, blocks.free];
    for (const [name, slots] of Object.entries({ device, ...tiers.slots })) {
      this.#rows[name] ??= new Row(this.body, name);
      this.#rows[name].show(time, slots, tiers.hits[name], tiers.down[name] ?? null, tiers.up[name] ?? null);
    }
    const [parked, own] = tiers.parked;
    this.note.textContent = `${whole(parked)} parked ${parked === 1 ? "sequence" : "sequences"} with ${whole(own)} slots of their own, `
      + `${whole(tiers.swaps)} swaps since the start, ${whole(tiers.deferred)} waiting for the disk`;
  }
}
