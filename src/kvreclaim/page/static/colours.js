// A hue for each running request. It keeps its hue while it runs; a new one takes the first that is free.

const GOLDEN_ANGLE = 137.508;
const FIRST_HUE = 230;

export class Colours {
  #slots = new Map();

  constructor(theme) {
    this.theme = theme;
  }

  // ids: the requests that run now
  keep(ids) {
    const running = new Set(ids);
    for (const id of this.#slots.keys()) if (!running.has(id)) this.#slots.delete(id);
    const taken = new Set(this.#slots.values());
    let slot = 0;
    for (const id of ids) {
      if (this.#slots.has(id)) continue;
      while (taken.has(slot)) slot += 1;
      taken.add(slot);
      this.#slots.set(id, slot);
    }
  }

  of(id) {
    const slot = this.#slots.get(id);
    if (slot === undefined) return this.theme.colour("--edge");
    const hue = (FIRST_HUE + slot * GOLDEN_ANGLE) % 360;
    return `oklch(${this.theme.dark ? 0.74 : 0.63} ${this.theme.dark ? 0.12 : 0.13} ${hue.toFixed(1)})`;
  }
}
