// Markdown of an answer as elements. A text that grows keeps the elements of the blocks that are complete.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { spans } from "./inline.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8; // lists and quotes in each other; what lies deeper is text
const indent = (line) => line.length - line.trimStart().length;

export class Markdown {
  #shown = []; // sources of the blocks

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const found = blocks(text.split("\n"), 0);
    let same = 0;
    while (same < found.length && found[same].source === this.#shown[same]) same += 1;
    const [old, next] = [this.element.children[same], found[same]];
    if (next?.code !== undefined && same === found.length - 1 && old?.matches("figure") && old.dataset.language === next.language) {
      old.querySelector("code").textContent = next.code; // it grows: its button stays where it is
    } else {
      while (this.element.children.length > same) this.element.lastElementChild.remove();
      this.element.append(...found.slice(same).map((block) => block.make()));
    }
    this.#shown = found.map((block) => block.source);
  }
}

// [{source, make(), code and language of a fence}] of lines
function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at, depth);
    found.push({ source: lines.slice(at, block.end).join("\n"), ...block });
    at = block.end;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return fence(lines, at);
  if (heading) return { end: at + 1, make: () => make(`h${Math.min(6, heading[1].length + 3)}`, {}, ...spans(heading[2])) };
  if (RULE.test(line)) return { end: at + 1, make: () => make("hr") };
  if (QUOTE.test(line) && depth < DEEPEST) return quote(lines, at, depth);
  if (ITEM.test(line) && depth < DEEPEST) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return { end, make: () => make("p", {}, ...spans(lines.slice(at, end).join("\n").trim())) };
}

const isTable = (lines, at) => lines[at].includes("|") && lines[at + 1]?.includes("-") && DIVIDER.test(lines[at + 1])
  && cells(lines[at]).length === cells(lines[at + 1]).length;
const interrupts = (lines, at) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(lines[at])) || isTable(lines, at);

// Without its end, which may still come, it reaches to the last line.
function fence(lines, at) {
  const [, mark, info] = FENCE.exec(lines[at]);
  const language = info.trim().split(/\s/)[0];
  const closes = (line) => line.trim().length >= mark.length && !line.trim().replaceAll(mark[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const margin = indent(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(margin, indent(line)))).join("\n");
  return { end: Math.min(end + 1, lines.length), code, language, make: () => codeBlock(language, code) };
}

function codeBlock(language, code) {
  const text = make("code", { textContent: code });
  const pre = make("pre", { tabIndex: 0, role: "region", ariaLabel: language ? `Code, ${language}` : "Code" }, text);
  const bar = make("figcaption", {}, language || "code", copyButton("Copy code", () => text.textContent));
  const figure = make("figure", {}, bar, pre);
  figure.dataset.language = language;
  return figure;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, make: () => make("blockquote", {}, ...elements(inner, depth + 1)) };
}

const elements = (lines, depth) => blocks(lines, depth).map((block) => block.make());

function list(lines, at, depth) {
  const [, margin, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const begins = (line) => {
    const item = ITEM.exec(line);
    return item !== null && item[1].length < margin.length + 2 && /\d/.test(item[2]) === isOrdered && !RULE.test(line);
  };
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end], isInside = indent(line) > margin.length;
    if (begins(line)) items.push([line.replace(ITEM, "")]);
    else if (line.trim() && !isInside && (!lines[end - 1].trim() || interrupts(lines, end))) break;
    else items.at(-1).push(line);
  }
  const start = isOrdered ? { start: Number.parseInt(mark, 10) } : {};
  return { end, make: () => make(isOrdered ? "ol" : "ul", start, ...items.map((item) => listItem(item, depth))) };
}

function listItem([first, ...others], depth) {
  const margin = Math.min(...others.filter((line) => line.trim()).map(indent));
  const found = elements([first, ...others.map((line) => line.slice(Math.min(margin, indent(line))))], depth + 1);
  const [head, ...rest] = found;
  return head?.matches("p") ? make("li", {}, ...head.childNodes, ...rest) : make("li", {}, ...found);
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function table(lines, at) {
  const columns = cells(lines[at + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "middle" : "number") : ""));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (tag, line) => {
    const found = cells(line);
    return make("tr", {}, ...columns.map((className, i) => make(tag, { className }, ...spans(found[i] ?? ""))));
  };
  return {
    end,
    make: () => make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table" },
      make("table", {}, make("thead", {}, row("th", lines[at])), make("tbody", {}, ...lines.slice(at + 2, end).map((line) => row("td", line))))),
  };
}
