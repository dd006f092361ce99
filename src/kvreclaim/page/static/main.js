// The page: one feed, and what is drawn from it.

import { Chart, Rate } from "./charts.js";
import { Chat } from "./chat.js";
import { Colours } from "./colours.js";
import { Compare } from "./compare.js";
import { make, percent, whole } from "./dom.js";
import { watch } from "./feed.js";
import { Pool, STATES } from "./pool.js";
import { Requests } from "./requests.js";
import { Sharing } from "./sharing.js";
import { Theme } from "./theme.js";
import { Tiers } from "./tiers.js";

const SUMMARY_MS = 10_000;
const HIT_WINDOW_S = 20;
const KEYS = ["free", "cached", "pinned", "in_use", "shared"];
const MEANINGS = [
  "holds nothing that could be used again",
  "held by no sequence; a prompt that begins alike finds it",
  "cached, and kept longer by a request's option",
  "held by one sequence",
  "held by several sequences at once",
];
const LINKS = {
  live: "live", lost: "connection lost, trying again", draining: "the server is shutting down", stopped: "the engine has stopped",
};
const find = (selector) => document.querySelector(selector);

const announce = (words) => { find("#answer-news").textContent = words; };
const theme = new Theme(find("#theme"));
const owners = new Colours(theme);
const pool = new Pool(find("#pool"), find("#readout"), owners, theme);
const requests = new Requests(document, owners, theme, (id) => pool.highlight(id));
// Not where nothing can be sent.
const chat = find("#chat") && new Chat(document, announce);
const compare = find("#compare") && new Compare(document, announce);
const tiers = new Tiers(find("#tiers"));
const sharing = new Sharing(find("#sharing"), owners, theme);
const tile = (name) => find(`[data-chart="${name}"]`);
const charts = {
  blocks: new Chart(tile("blocks"), { label: "Blocks in use", format: whole }),
  tokens: new Chart(tile("tokens"), { label: "Tokens per second", format: whole }),
  hits: new Chart(tile("hits"), { label: "Prefix hit rate", format: percent, top: 1 }),
  freed: new Chart(tile("freed"), { label: "Blocks freed per second", format: whole }),
};
const rates = {
  generated: new Rate(1), prompt: new Rate(1), freed: new Rate(1), queried: new Rate(HIT_WINDOW_S), hit: new Rate(HIT_WINDOW_S),
};
const stateCells = STATES.map((name, i) => {
  const row = find("#states").insertRow();
  row.insertCell().textContent = name;
  const amount = row.insertCell();
  amount.className = "number";
  row.insertCell().textContent = MEANINGS[i];
  return amount;
});
let peak = 0;
let summary = "";

function value(chart, main, small, note) {
  charts[chart].value.replaceChildren(main, make("small", { textContent: small }));
  charts[chart].note.textContent = note;
}

const perSecond = ([increase, seconds]) => (seconds > 0 ? increase / seconds : 0);

function showFigures(frame) {
  const { blocks, totals, at_s: time, num_blocks: all } = frame;
  const inUse = blocks.in_use + blocks.shared;
  peak = Math.max(peak, inUse);
  charts.blocks.push(time, inUse);
  value("blocks", whole(inUse), ` of ${whole(all)}`, `${percent(inUse / all)}; peak ${whole(peak)}`);

  const generated = perSecond(rates.generated.add(time, totals.generation_tokens));
  const prompt = perSecond(rates.prompt.add(time, totals.prompt_tokens));
  charts.tokens.push(time, generated);
  value("tokens", whole(generated), " generated", `and ${whole(prompt)} of prompts computed`);

  const [queried] = rates.queried.add(time, totals.prefix_query_tokens);
  const [hit] = rates.hit.add(time, totals.prefix_hit_tokens);
  charts.hits.push(time, queried > 0 ? hit / queried : null);
  const ever = totals.prefix_query_tokens ? percent(totals.prefix_hit_tokens / totals.prefix_query_tokens) : "–";
  value("hits", ever, " since the start", queried > 0 ? `last ${HIT_WINDOW_S} s: ${percent(hit / queried)} of ${whole(queried)} tokens`
    : `no prompt in the last ${HIT_WINDOW_S} s`);

  const freed = perSecond(rates.freed.add(time, totals.blocks_freed));
  charts.freed.push(time, Math.max(0, freed));
  value("freed", whole(totals.blocks_freed), " since the start",
    `${whole(totals.tokens_evicted)} tokens evicted in ${whole(totals.compactions)} compactions`);
}

function showPool(frame) {
  const { blocks, num_blocks: all, shown, group, states } = frame;
  const slots = !states ? "" : `; states: ${whole(states.in_use)} of ${whole(states.in_use + states.cached + states.free)} slots in use, `
    + `${whole(states.checkpoints)} ${states.checkpoints === 1 ? "checkpoint" : "checkpoints"}`;
  pool.show(frame);
  const drawn = shown < all ? `the first ${whole(shown)} of ${whole(all)} blocks (the others are free)` : `${whole(all)} blocks`;
  find("#pool-scale").textContent = drawn + (group === 1 ? ", one per cell" : `, ${group} per cell; the fuller, the stronger`) + slots;
  KEYS.forEach((key, i) => {
    const words = whole(blocks[key]);
    if (stateCells[i].textContent !== words) stateCells[i].textContent = words;
  });
  summary = `${whole(blocks.in_use + blocks.shared)} of ${whole(all)} blocks in use by ${whole(frame.num_owners)} ${frame.num_owners === 1 ? "request" : "requests"}, `
    + `${whole(blocks.shared)} of them shared; ${whole(blocks.cached)} cached, ${whole(blocks.pinned)} pinned, `
    + `${whole(blocks.free)} free. Compression has freed ${whole(frame.totals.blocks_freed)} blocks.`;
  find("#pool-summary").textContent = summary;
}

watch({
  state(word) {
    find("#link").dataset.state = word === "live" ? "live" : "lost";
    find("#link-text").textContent = LINKS[word];
  },
  frame(frame) {
    owners.keep(frame.requests.map(([id]) => id));
    showFigures(frame);
    showPool(frame);
    requests.show(frame);
    tiers.show(frame);
    sharing.show(frame);
    chat?.watch(frame, owners);
    compare?.watch(frame, owners);
    document.documentElement.dataset.ready = "true";
  },
  compactions(passes, blocks) {
    requests.compacted(passes);
    pool.flash(blocks);
  },
});

let announced = "";
setInterval(() => {
  if (summary !== announced) find("#pool-news").textContent = announced = summary;
}, SUMMARY_MS);

try {
  const response = await fetch("/page/settings");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const settings = await response.json();
  find("#model").textContent = settings.models[0];
  find("#block-size").textContent = settings.block_size;
  find("#model").title = `${whole(settings.num_blocks)} blocks of ${settings.block_size} tokens, sequences of at most ${whole(settings.max_model_len)} tokens`;
  chat?.offer(settings);
  compare?.offer(settings);
} catch (error) {
  const words = `The settings did not come (${error.message}); reload the page.`;
  announce(words);
  chat?.complain(words);
}
