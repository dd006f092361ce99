// The block pool on a canvas: one cell per block, or several blocks per cell in a large pool.

import { whole } from "./dom.js";

export const FREE = 0, CACHED = 1, PINNED = 2, IN_USE = 3, SHARED = 4;
export const STATES = ["free", "cached", "pinned", "in use", "shared"];
const MAX_HEIGHT = 400; // CSS pixels
const MIN_PITCH = 3, MAX_PITCH = 22;
const FLASH_MS = 1400;

export class Pool {
  #frame = null;
  #flashes = new Map(); // block -> when it was given back
  #base = document.createElement("canvas");
  #cursor = null;
  #highlight = null;
  #painting = false;
  #colours = {};

  constructor(canvas, readout, owners, theme) {
    Object.assign(this, { canvas, readout, owners, theme });
    this.context = canvas.getContext("2d");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.#readColours();
    theme.onChange(() => { this.#readColours(); this.#draw(); });
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#point(this.#cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    canvas.addEventListener("focus", () => this.#point(this.#cursor ?? 0));
    canvas.addEventListener("blur", () => this.#point(null));
  }

  show(frame) {
    this.#frame = frame;
    this.#draw();
    if (this.#cursor !== null) this.#tell();
  }

  // These blocks were given back a moment ago.
  flash(blocks) {
    const now = performance.now();
    for (const block of blocks) this.#flashes.set(block, now);
    this.#paint();
  }

  get numFlashing() {
    return this.#flashes.size;
  }

  // Dim what is not this request's; null: nothing.
  highlight(id) {
    this.#highlight = id;
    this.#draw();
  }

  #readColours() {
    for (const name of ["free", "cached", "cached-fill", "pinned", "shared", "shared-mark", "freed", "ink", "panel"]) {
      this.#colours[name] = this.theme.colour(`--${name}`);
    }
  }

  #layout() {
    const width = this.canvas.parentElement.clientWidth - this.#padding();
    const num = this.#frame.cells.state.length;
    const rough = Math.min(MAX_PITCH, Math.max(MIN_PITCH, Math.sqrt((width * MAX_HEIGHT) / num)));
    const columns = Math.max(1, Math.ceil(width / rough));
    const pitch = Math.min(MAX_PITCH, width / columns);
    return { num, columns, pitch, width, height: Math.ceil(num / columns) * pitch };
  }

  #padding() {
    const style = getComputedStyle(this.canvas.parentElement);
    return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  }

  #draw() {
    if (!this.#frame) return;
    const layout = (this.layout = this.#layout());
    const scale = (this.scale = window.devicePixelRatio || 1);
    const [width, height] = [Math.round(layout.width * scale), Math.round(layout.height * scale)];
    for (const canvas of [this.#base, this.canvas]) {
      if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    }
    this.canvas.style.height = `${layout.height}px`;
    const context = this.#base.getContext("2d");
    context.clearRect(0, 0, width, height);
    const colours = this.#frame.requests.map(([id]) => this.owners.of(id));
    const chosen = this.#frame.requests.findIndex(([id]) => id === this.#highlight) + 1;
    for (let cell = 0; cell < layout.num; cell += 1) this.#drawCell(context, cell, colours, chosen);
    context.globalAlpha = 1;
    this.#paint();
  }

  #box(cell) {
    const { columns, pitch } = this.layout;
    const step = pitch * this.scale;
    const gap = Math.max(1, Math.round((pitch >= 12 ? 2 : pitch >= 6 ? 1 : 0.5) * this.scale));
    const [column, row] = [cell % columns, Math.floor(cell / columns)];
    const [x, y] = [Math.round(column * step), Math.round(row * step)];
    return { x, y, w: Math.round((column + 1) * step) - x - gap, h: Math.round((row + 1) * step) - y - gap };
  }

  #drawCell(context, cell, colours, chosen) {
    const { cells, group } = this.#frame;
    const state = cells.state[cell], owner = cells.owner[cell];
    const { x, y, w, h } = this.#box(cell);
    const dim = chosen > 0 && owner !== chosen ? 0.25 : 1;
    context.globalAlpha = dim;
    context.fillStyle = this.#colours.free;
    context.fillRect(x, y, w, h);
    if (state === FREE) return;
    context.globalAlpha = dim * (group > 1 ? 0.3 + 0.7 * this.#share(cell) : 1);
    if (state === IN_USE) {
      context.fillStyle = colours[owner - 1] ?? this.#colours.cached;
      context.fillRect(x, y, w, h);
    } else if (state === SHARED) {
      context.fillStyle = this.#colours.shared;
      context.fillRect(x, y, w, h);
      this.#mark(context, { x, y, w, h }, this.#colours["shared-mark"], 0.34);
    } else {
      this.#hollow(context, { x, y, w, h }, state);
    }
  }

  #hollow(context, { x, y, w, h }, state) {
    const line = state === PINNED ? this.#colours.pinned : this.#colours.cached;
    const edge = Math.max(1, Math.round(w * 0.12));
    context.fillStyle = line;
    context.fillRect(x, y, w, h);
    if (w < 4) return;
    context.fillStyle = this.#colours["cached-fill"];
    context.fillRect(x + edge, y + edge, w - 2 * edge, h - 2 * edge);
    if (state === PINNED) this.#mark(context, { x, y, w, h }, line, 0.4);
  }

  #mark(context, { x, y, w, h }, colour, part) {
    if (w < 5) return;
    const side = Math.max(2, Math.round(w * part));
    context.fillStyle = colour;
    context.fillRect(x + Math.round((w - side) / 2), y + Math.round((h - side) / 2), side, side);
  }

  // Share of a cell's blocks that are not free.
  #share(cell) {
    const { cells } = this.#frame;
    return Math.min(1, cells.counts.reduce((sum, plane) => sum + plane[cell], 0) / this.#size(cell));
  }

  // Blocks in a cell; the last one may have fewer.
  #size(cell) {
    return Math.min(this.#frame.group, this.#frame.shown - cell * this.#frame.group);
  }

  #paint() {
    if (!this.#frame || !this.layout || this.#painting) return;
    this.#painting = true;
    requestAnimationFrame((now) => {
      this.#painting = false;
      this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      if (this.#base.width && this.#base.height) this.context.drawImage(this.#base, 0, 0);
      this.#paintFlashes(now);
      this.#paintCursor();
      if (this.#flashes.size && !this.still.matches) this.#paint();
    });
  }

  #paintFlashes(now) {
    const context = this.context;
    for (const [block, since] of this.#flashes) {
      const age = Math.max(0, (now - since) / FLASH_MS), cell = Math.floor(block / this.#frame.group);
      if (age >= 1 || cell >= this.layout.num) {
        this.#flashes.delete(block);
        continue;
      }
      const { x, y, w, h } = this.#box(cell);
      const fresh = this.still.matches ? 1 : (1 - age) ** 1.3;
      context.globalAlpha = fresh;
      context.fillStyle = this.#colours.freed;
      const grow = this.still.matches ? 0 : Math.round(Math.min(3 * this.scale, w * 0.25) * fresh);
      context.fillRect(x - grow, y - grow, w + 2 * grow, h + 2 * grow);
    }
    context.globalAlpha = 1;
    if (this.#flashes.size && this.still.matches) setTimeout(() => this.#paint(), FLASH_MS / 4);
  }

  #paintCursor() {
    if (this.#cursor === null) return;
    const { x, y, w, h } = this.#box(this.#cursor);
    const line = Math.max(2, 2 * this.scale);
    this.context.lineWidth = line;
    this.context.strokeStyle = this.#colours.ink;
    this.context.strokeRect(x - line / 2, y - line / 2, w + line, h + line);
  }

  #cellAt(event) {
    if (!this.layout) return null;
    const { columns, pitch, num } = this.layout;
    const column = Math.floor(event.offsetX / pitch), row = Math.floor(event.offsetY / pitch);
    const cell = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && cell < num ? cell : null;
  }

  #point(cell) {
    if (!this.#frame) return;
    if (cell === null && document.activeElement === this.canvas) return;
    this.#cursor = cell;
    this.#tell();
    this.#paint();
  }

  #move(event) {
    if (!this.layout) return;
    const { columns, num } = this.layout;
    const at = this.#cursor ?? 0;
    const steps = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns, Home: 0, End: num - 1,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const to = steps[event.key];
    if (to >= 0 && to < num) this.#point(to);
  }

  #tell() {
    const words = this.#cursor === null ? "Point at a cell, or move with the arrow keys." : this.describe(this.#cursor);
    if (this.readout.textContent !== words) this.readout.textContent = words;
  }

  // What a cell holds, in words.
  describe(cell) {
    const { cells, group, requests, first: offset } = this.#frame;
    const owner = requests[cells.owner[cell] - 1]?.[0];
    if (group === 1) {
      const held = owner && cells.state[cell] === IN_USE ? ` by ${owner}` : "";
      return `Block ${whole(offset + cell)}: ${STATES[cells.state[cell]]}${held}.`;
    }
    const first = offset + cell * group, size = this.#size(cell);
    const amounts = cells.counts.map((plane) => plane[cell]);
    const free = size - amounts.reduce((sum, amount) => sum + amount, 0);
    const parts = [free, ...amounts].map((amount, state) => (amount ? `${amount} ${STATES[state]}` : ""));
    const mostly = owner && cells.state[cell] === IN_USE ? `, most of them by ${owner}` : "";
    return `Blocks ${whole(first)} to ${whole(first + size - 1)}: ${parts.filter(Boolean).join(", ")}${mostly}.`;
  }
}
