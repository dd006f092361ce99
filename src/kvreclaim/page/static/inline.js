// What stands inside a line of Markdown: code, emphasis, links. Text becomes text nodes, never HTML.

import { make } from "./dom.js";

const SPANS = new RegExp([
  "\\\\(?<escaped>[\\\\`*_~#|<>+.!-])",
  "(?<!`)(?<ticks>`+)(?!`)(?<code>.+?)(?<!`)\\k<ticks>(?!`)",
  "!?\\[(?<label>(?:[^\\[\\]]|\\[[^\\[\\]]*\\])*)\\]\\(\\s*(?<url>[^\\s()]*(?:\\([^\\s()]*\\)[^\\s()]*)*)(?:\\s+\"[^\"]*\")?\\s*\\)",
  "\\*\\*(?=\\S)(?<strong>.+?)(?<=\\S)\\*\\*(?!\\*)",
  "(?<!\\w)__(?=\\S)(?<strong_>.+?)(?<=\\S)__(?!\\w)",
  "\\*(?=[^\\s*])(?<em>(?:\\*\\*[^*]+\\*\\*|[^*])+?)(?<=\\S)\\*(?!\\*)",
  "(?<!\\w)_(?=[^\\s_])(?<em_>[^_]+?)(?<=\\S)_(?!\\w)",
  "~~(?=\\S)(?<del>.+?)(?<=\\S)~~",
  "(?<bare>https?://[^\\s<>`*]*[^\\s<>`*.,;:!?)\\]\"'])",
].join("|"), "gs");
const SAFE = /^(?:https?:\/\/|mailto:)/i;

// The nodes of a text.
export function spans(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(SPANS)) {
    nodes.push(text.slice(at, match.index), span(match));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)].filter((node) => node !== "");
}

function span({ 0: source, groups }) {
  const { escaped, code, label, url, bare } = groups;
  if (escaped) return escaped;
  if (code !== undefined) return make("code", { textContent: code.replace(/^ (.*\S.*) $/s, "$1") });
  if (bare) return link(bare, [bare]);
  if (url !== undefined) return SAFE.test(url) ? link(url, label ? spans(label) : [url]) : source;
  for (const tag of ["strong", "em", "del"]) {
    const inner = groups[tag] ?? groups[`${tag}_`];
    if (inner !== undefined) return make(tag, {}, ...spans(inner));
  }
  return source;
}

// A picture is a link, too: the page loads nothing from elsewhere.
function link(href, nodes) {
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...nodes);
}
