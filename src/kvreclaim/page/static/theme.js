// Light, dark, or as the system says. Canvas code asks for colours here, since it cannot use CSS variables.

const KEY = "kvreclaim-theme";
const CHOICES = ["auto", "light", "dark"];

export class Theme {
  #listeners = [];

  constructor(select) {
    const stored = localStorage.getItem(KEY);
    select.value = CHOICES.includes(stored) ? stored : "auto";
    document.documentElement.dataset.theme = select.value;
    select.addEventListener("change", () => {
      localStorage.setItem(KEY, select.value);
      document.documentElement.dataset.theme = select.value;
      this.#tell();
    });
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", () => this.#tell());
  }

  onChange(listener) {
    this.#listeners.push(listener);
  }

  get dark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen === "auto" ? this.system.matches : chosen === "dark";
  }

  // The computed value of a custom property that holds a colour.
  colour(name) {
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  #tell() {
    for (const listener of this.#listeners) listener();
  }
}
