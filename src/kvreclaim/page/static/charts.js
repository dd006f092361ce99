// Lines over the last two minutes, as SVG.

const WINDOW_S = 120, LEAST_S = 20; // the axis grows from the one to the other
const WIDTH = 240, HEIGHT = 56;
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #points = []; // [time in s, value or null for a gap]

  // tile: an article with a heading; top: what the axis ends at, null: at what the data needs
  constructor(tile, { format, label, top = null }) {
    Object.assign(this, { format, label, top });
    this.value = tile.querySelector("[data-value]");
    this.note = tile.querySelector("[data-note]");
    const box = document.createElement("div");
    box.className = "chart";
    this.mark = document.createElement("span");
    this.mark.className = "top";
    this.mark.setAttribute("aria-hidden", "true");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    [this.area, this.line] = ["area", "line"].map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      this.svg.append(path);
      return path;
    });
    box.append(this.svg, this.mark);
    tile.append(box);
  }

  push(time, value) {
    if (this.#points.length && time < this.#points.at(-1)[0]) this.#points = []; // another server's clock
    this.#points.push([time, value]);
    while (this.#points.length && this.#points[0][0] < time - WINDOW_S) this.#points.shift();
    this.#draw(time);
  }

  #draw(now) {
    const values = this.#points.map(([, value]) => value).filter((value) => value !== null);
    const most = Math.max(0, ...values);
    const top = this.top ?? niceAbove(most);
    const pieces = [];
    let piece = [];
    const span = Math.min(WINDOW_S, Math.max(LEAST_S, now - this.#points[0][0]));
    for (const [time, value] of [...this.#points, [now, null]]) {
      if (value === null) {
        if (piece.length > 1) pieces.push(piece);
        piece = [];
        continue;
      }
      const x = WIDTH * (1 - (now - time) / span), y = (HEIGHT - 1) * (1 - Math.min(1, value / top)) + 0.5;
      piece.push(`${x.toFixed(1)},${y.toFixed(1)}`);
    }
    this.line.setAttribute("d", pieces.map((points) => `M${points.join("L")}`).join(""));
    const foot = (point) => `${point.split(",")[0]},${HEIGHT}`;
    this.area.setAttribute(
      "d", pieces.map((points) => `M${foot(points[0])}L${points.join("L")}L${foot(points.at(-1))}Z`).join(""),
    );
    this.mark.textContent = this.format(top);
    const range = values.length ? `now ${this.format(values.at(-1))}, at most ${this.format(most)}` : "no data yet";
    this.svg.setAttribute("aria-label", `${this.label}, last two minutes: ${range}`);
  }
}

// The smallest of 1, 2, 5, 10, 20, ... that is not below a number.
function niceAbove(number) {
  let step = 1;
  for (;;) {
    for (const factor of [1, 2, 5]) if (step * factor >= number) return step * factor;
    step *= 10;
  }
}

// Increase of a counter per second, over the last `seconds`.
export class Rate {
  #samples = [];

  constructor(seconds) {
    this.seconds = seconds;
  }

  // [increase, seconds it took]
  add(time, total) {
    const samples = this.#samples;
    if (samples.length && (total < samples.at(-1)[1] || time < samples.at(-1)[0])) samples.length = 0; // restarted
    samples.push([time, total]);
    while (samples.length > 2 && samples[1][0] <= time - this.seconds) samples.shift();
    const [since, before] = samples[0];
    return [total - before, time - since];
  }
}
