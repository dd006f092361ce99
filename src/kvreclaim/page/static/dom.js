// Elements, and figures in words, as every part of the page writes them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const whole = (number) => Math.round(number).toLocaleString("en");
export const some = (count, one) => `${whole(count)} ${one}${count === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export function bytes(number) {
  const power = number < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(number) / 10));
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const button = (textContent, onClick, properties = {}) =>
  make("button", { type: "button", textContent, onclick: onClick, ...properties });
