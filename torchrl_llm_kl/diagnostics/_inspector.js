// The page: decoding, the list, the open rollout, charts. _inspector.py joins _parts.js, this file and _controls.js.

const $ = (id) => document.getElementById(id);
const meta = JSON.parse($("meta").textContent);
const { quantities, sides, pairs, names } = meta;
const numeric = quantities.filter((quantity) => quantity.of.length);
const two = sides.length === 2;
const ROW = 56; // height of an entry of the list, as in the style sheet

// ------------------------------------------------------------------ decoding

for (const side of sides) {
  side.count = side.lengths.length;
  side.stats = floats(side.stats);
  side.offsets = [0];
  for (const length of side.lengths) side.offsets.push(side.offsets[side.offsets.length - 1] + length);
  for (const part of ["positions", "turns", "worstValues", "parts"]) for (const name in side[part]) side[part][name] = floats(side[part][name]);
  side.texts = new Map();
}
const idsReady = Promise.all(sides.map(async (side, s) => {
  const planes = await inflated(`ids${s}`);
  side.ids = new Uint32Array(joined(planes, 0, planes.length / 4));
}));

/** Numbers per rollout: the reward, the count of scored tokens, and the mean and largest number of each quantity. */
const stat = (side, k, row) => sides[side].stats[k * sides[side].count + row];
const reward = (side, row) => stat(side, 0, row);
const scoredTokens = (side, row) => stat(side, 1, row);
const meanOf = (side, quantity, row) => stat(side, 2 + 2 * numeric.indexOf(quantity), row);
const largestOf = (side, quantity, row) => stat(side, 3 + 2 * numeric.indexOf(quantity), row);

/** The rollouts of each prompt. */
const groups = sides.map((side) => {
  const found = new Map();
  side.prompts.forEach((prompt, row) => found.has(prompt) ? found.get(prompt).push(row) : found.set(prompt, [row]));
  return found;
});
const groupOf = (side, row) => groups[side].get(sides[side].prompts[row]);
const grouped = [...groups[0].values()].some((rows) => rows.length > 1);
const partNames = [...new Set(sides.flatMap((side) => Object.keys(side.parts)))];
const partOf = (side, name, row) => sides[side].parts[name]?.[row] ?? NaN;

const hasReward = sides[0].stats.subarray(0, sides[0].count).some((value) => !Number.isNaN(value));

const opened = new Map(); // decoded rollouts, the latest last
async function load(side, row) {
  const key = `${side}-${row}`;
  if (opened.has(key)) return opened.get(key);
  const [data] = await Promise.all([inflated(`r${key}`), idsReady]);
  const n = sides[side].lengths[row], flags = data.subarray(0, n), scored = [];
  const turns = new Int32Array(n).fill(-1), places = new Int32Array(n).fill(-1), starts = [];
  for (let i = 0; i < n; i++) if (flags[i] & 1) {
    if (!i || !(flags[i - 1] & 1)) starts.push(i);
    turns[i] = starts.length - 1;
    places[i] = scored.push(i) - 1;
  }
  const columns = {}, m = scored.length;
  meta.columns.forEach(([name], k) => {
    const packed = new Float32Array(joined(data, n + 4 * m * k, m)), full = new Float32Array(n).fill(NaN);
    for (let j = 0; j < m; j++) full[scored[j]] = packed[j];
    columns[name] = full;
  });
  const ids = sides[side].ids.subarray(sides[side].offsets[row], sides[side].offsets[row + 1]);
  const rollout = { side, row, n, ids, flags, scored, turns, places, starts, columns };
  opened.set(key, rollout);
  if (opened.size > 12) opened.delete(opened.keys().next().value);
  return rollout;
}

function valueAt(rollout, quantity, i) {
  if (!(rollout.flags[i] & 1) || quantity.kind === "category") return NaN;
  if (quantity.kind === "row") return reward(rollout.side, rollout.row);
  const [first, second] = quantity.of.map((name) => rollout.columns[name][i]);
  return quantity.of.length === 1 ? first : Math.fround(first - second);
}

/** The text of a rollout in lower case, and the start of each token in it. Parts of a character are joined. */
function textOf(side, row) {
  const known = sides[side].texts;
  if (known.has(row)) return known.get(row);
  const { ids, offsets } = sides[side], starts = [], decoder = new TextDecoder();
  let text = "", pending = [];
  const flush = () => { text += decoder.decode(new Uint8Array(pending)).toLowerCase(); pending = []; };
  for (let i = offsets[row]; i < offsets[row + 1]; i++) {
    const bytes = meta.bytes[ids[i]];
    if (!bytes && pending.length) flush();
    starts.push(text.length);
    if (bytes) pending.push(...bytes); else text += meta.texts[ids[i]].toLowerCase();
  }
  flush();
  known.set(row, { text, starts });
  return known.get(row);
}
const shownOf = (id) => meta.shown[id] ?? meta.texts[id];
const special = new Set(meta.special);

function stepOf(value, scale) {
  const size = (Math.abs(value) / scale) * meta.steps;
  return Math.sign(value) * (size >= meta.steps ? meta.steps : Math.floor(size));
}
const stepClass = (step) => (step > 0 ? `w${step}` : step < 0 ? `c${-step}` : "");

// ------------------------------------------------------------------ state

const state = {
  prompts: ["prompt", false], quantity: quantities[0], threshold: null, query: "", sort: "row", down: false,
  order: [], row: -1, panes: [], worst: null, rank: -1, token: null, difference: false, same: 0, hit: -1,
};
let opening = 0;

/** The columns of the list: [key, label, unit, function of a row]. */
function listColumns() {
  const kl = numeric.find((quantity) => quantity.name === "kl");
  const mismatch = numeric.find((quantity) => quantity.name === "mismatch");
  const own = numeric.includes(state.quantity) ? state.quantity : null;
  const columns = [["row", "Row", "", (row) => row]];
  if (hasReward) columns.push(["reward", "Reward", "", (row) => reward(0, row)]);
  for (const name of partNames) columns.push([`reward/${name}`, name, "reward", (row) => partOf(0, name, row)]);
  if (kl) columns.push(["kl", "KL", "nats/token", (row) => meanOf(0, kl, row)]);
  columns.push(["length", "Length", "tokens", (row) => scoredTokens(0, row)]);
  if (mismatch) columns.push(["mismatch", "Mismatch", "nats/token", (row) => meanOf(0, mismatch, row)]);
  if (own) columns.push(["worst", "Worst", own.unit, (row) => largestOf(0, own, row)]);
  if (own && two) columns.push(["change", "Change", "of mean", (row) => (pairs[row] < 0 ? NaN : meanOf(1, own, pairs[row]) - meanOf(0, own, row))]);
  return columns;
}

function refilter() {
  const query = state.query.toLowerCase(), { quantity, threshold } = state;
  const key = (listColumns().find(([name]) => name === state.sort) ?? listColumns()[0])[3];
  const rows = [];
  for (let row = 0; row < sides[0].count; row++) {
    if (threshold !== null && quantity.kind !== "category") {
      const size = quantity.kind === "row" ? Math.abs(reward(0, row)) : largestOf(0, quantity, row);
      if (!(size >= threshold)) continue;
    }
    const found = (side, at) => at >= 0 && textOf(side, at).text.includes(query);
    if (query && !found(0, row) && !(two && found(1, pairs[row]))) continue;
    rows.push(row);
  }
  const sign = state.down ? -1 : 1;
  const compare = (a, b) => {
    const x = key(a), y = key(b);
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b; // without a number: last
    return x === y ? a - b : x < y ? -sign : sign;
  };
  state.order = rows.sort(compare);
  const all = sides[0].count;
  $("count").textContent = rows.length === all ? `${all} rollouts` : `${rows.length} of ${all} rollouts`;
  $("spacer").style.height = `${rows.length * ROW}px`;
  renderColumns();
  redrawList();
  if (!$("panel-prompts").hidden) renderPrompts();
}

// ------------------------------------------------------------------ the list

function renderColumns() {
  const columns = listColumns();
  $("columns").replaceChildren(...columns.map(([key, label, unit]) => sortButton(key, label, unit, state.sort === key, state.down)));
  $("panel-rollouts").style.setProperty("--columns", columns.length);
}
function sortButton(key, label, unit, on, down) {
  const arrow = on ? (down ? " ↓" : " ↑") : "", order = on ? (down ? ", descending" : ", ascending") : "";
  const button = el("button", { type: "button", title: label, "aria-pressed": on, "aria-label": `Sort by ${label}${order}` }, el("span", {}, label + arrow), el("small", {}, unit || "\u00a0"));
  button.dataset.sort = key;
  return button;
}

/** The columns of the prompts: [key, label, function of a prompt and its rollouts]. */
const PROMPT_COLUMNS = [
  ["prompt", "Prompt", (prompt) => prompt],
  ["answers", "Answers", (_, rows) => rows.length],
  ["mean", "Mean reward", (_, rows) => rewardsOf(0, rows).mean],
  ["deviation", "Deviation", (_, rows) => rewardsOf(0, rows).deviation],
];
const rewardsOf = (side, rows) => spread(rows.map((row) => reward(side, row)));
/** The rewards of answers to one prompt, coloured by their distance from the mean. */
function rewardChips(side, rows, most = Infinity) {
  const { mean, low, high } = rewardsOf(side, rows), scale = Math.max(high - mean, mean - low) || 1;
  const chips = rows.slice(0, most).map((row) => {
    const value = reward(side, row);
    const chip = el("span", { className: `chip ${Number.isFinite(value) ? stepClass(stepOf(value - mean, scale)) : ""}` }, short(value));
    chip.dataset.row = row;
    return chip;
  });
  return rows.length > most ? [...chips, `and ${rows.length - most} more`] : chips;
}
function spreadText(side, rows) {
  const { n, mean, deviation, low, high } = rewardsOf(side, rows);
  return n ? `mean ${short(mean)}${n > 1 ? ` · deviation ${short(deviation)} · ${short(low)} to ${short(high)}` : ""}` : "no reward";
}

/** The prompts with listed rollouts. */
function renderPrompts() {
  const [key, down] = state.prompts, number = PROMPT_COLUMNS.find(([name]) => name === key)[2], sign = down ? -1 : 1;
  $("prompt-columns").replaceChildren(...PROMPT_COLUMNS.map(([name, label]) => sortButton(name, label, "", name === key, down)));
  const listed = [...new Set(state.order.map((row) => sides[0].prompts[row]))].map((prompt) => [prompt, number(prompt, groups[0].get(prompt))]);
  listed.sort(([a, x], [b, y]) => (Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) || a - b : sign * (x - y) || a - b));
  $("prompts").replaceChildren(...listed.map(([prompt]) => {
    const rows = groups[0].get(prompt), button = el("button", { type: "button" }, el("b", {}, `Prompt ${prompt}`), ` ${rows.length} answers${hasReward ? ` · ${spreadText(0, rows)}` : ""}`, el("p", {}, preview(rows[0]).prompt), ...(hasReward ? [el("div", { className: "chips" }, ...rewardChips(0, rows, 16))] : []));
    button.dataset.row = rows[0];
    return el("li", {}, button);
  }));
}

/** The answers to the prompt of the open rollout. */
function renderGroup() {
  const rows = groupOf(0, state.row), shown = rows.length > 1;
  $("group").hidden = !shown;
  if (!shown) return;
  const chips = hasReward ? rewardChips(0, rows) : rows.map((row) => el("span", { className: "chip" }));
  const buttons = rows.map((row, i) => {
    const button = el("button", { type: "button", "aria-label": `Rollout ${row}${hasReward ? `, reward ${short(reward(0, row))}` : ""}` }, el("small", {}, `#${row}`), chips[i]);
    if (row === state.row) button.setAttribute("aria-current", "true");
    button.dataset.row = row;
    return button;
  });
  $("group").replaceChildren(el("span", {}, `${rows.length} answers to this prompt${hasReward ? `: ${spreadText(0, rows)}` : ""}`), el("div", { className: "chips" }, ...buttons));
}

const drawn = new Map(); // row -> its entry
/** Draw the visible entries and a few more. Entries that stay visible are reused. */
function renderList() {
  const list = $("list"), spacer = $("spacer");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 6), last = Math.min(state.order.length, first + Math.ceil(list.clientHeight / ROW) + 13);
  const wanted = new Set(state.order.slice(first, last));
  for (const [row, entry] of drawn) if (!wanted.has(row)) { entry.remove(); drawn.delete(row); }
  const columns = listColumns();
  for (let at = first; at < last; at++) {
    const row = state.order[at];
    if (!drawn.has(row)) drawn.set(row, buildEntry(row, at, columns));
    const entry = drawn.get(row);
    entry.setAttribute("aria-selected", row === state.row);
    if (spacer.children[at - first] !== entry) spacer.insertBefore(entry, spacer.children[at - first] ?? null);
  }
  drawn.has(state.row) ? list.setAttribute("aria-activedescendant", `row-${state.row}`) : list.removeAttribute("aria-activedescendant");
}

function buildEntry(row, at, columns) {
  const numbers = el("div", { className: "numbers" });
  for (const [key, , , number] of columns) numbers.append(el("span", {}, key === "row" ? `#${row}` : short(number(row))));
  const { prompt, answer } = preview(row), text = el("p", {}, el("span", {}, answer), prompt && ` ← ${prompt}`);
  const entry = el("div", { className: "row", id: `row-${row}`, role: "option", "aria-posinset": at + 1, "aria-setsize": state.order.length }, numbers, text);
  entry.dataset.row = row;
  entry.style.top = `${at * ROW}px`;
  return entry;
}

function redrawList() {
  for (const entry of drawn.values()) entry.remove();
  drawn.clear();
  renderList();
}

/** The start of a rollout's answer and the end of its prompt, without special tokens. Prompts of one data set often begin with the same text. */
function preview(row) {
  const side = sides[0], start = side.offsets[row], first = start + side.firsts[row];
  if (!side.ids) return { prompt: "", answer: "" };
  const shown = (i) => special.has(side.ids[i]) ? "" : shownOf(side.ids[i]).slice(0, 110);
  const plain = (text) => text.replace(/[↵\s]+/g, " ").trim();
  let i = first, prompt = "", answer = "";
  while (i > start && prompt.length < 60) prompt = shown(--i) + prompt;
  for (let at = first; at < side.offsets[row + 1] && answer.length < 110; at++) answer += shown(at);
  const cut = i > start || prompt.length > 60;
  prompt = plain(prompt).replace(/ assistant$/, "");
  return { prompt: `${cut ? "…" : ""}${prompt.slice(-60)}`, answer: plain(answer) };
}

function scrollToRow(row) {
  const list = $("list"), top = state.order.indexOf(row) * ROW;
  if (top < 0) return;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
}

function renderWorst() {
  const { name } = state.quantity, found = sides[0].worst[name] ?? [];
  const entries = found.map(([row, at], k) => {
    const start = sides[0].offsets[row], token = (i) => shownOf(sides[0].ids[start + i]), length = sides[0].lengths[row];
    const near = (from, to) => Array.from({ length: Math.max(0, Math.min(length, to) - Math.max(0, from)) }, (_, i) => token(Math.max(0, from) + i)).join("").replace(/[↵\s]+/g, " ");
    const colour = stepClass(stepOf(sides[0].worstValues[name][k], state.quantity.scale));
    const words = el("span", { className: "near" }, el("span", {}, near(at - 16, at).slice(-40)), el("b", { className: colour }, token(at).trimEnd().slice(0, 40) || "␣"), el("span", {}, near(at + 1, at + 17).slice(0, 40)));
    const button = el("button", { type: "button" }, el("span", {}, short(sides[0].worstValues[name][k])), el("span", {}, `#${row}`), words);
    button.dataset.row = row;
    button.dataset.at = at;
    return el("li", {}, button);
  });
  $("worst").replaceChildren(...(entries.length ? entries : [el("li", {}, "No worst tokens: choose a quantity with a number per token.")]));
}

// ------------------------------------------------------------------ the open rollout

async function open(row, token = null, focus = false) {
  const ticket = ++opening;
  const partner = two ? pairs[row] : -1;
  const rollouts = await Promise.all([load(0, row), ...(partner >= 0 ? [load(1, partner)] : [])]);
  if (ticket !== opening) return;
  Object.assign(state, { row, token: null, rank: -1, worst: null, hit: -1 });
  hideCard();
  const [a, b] = rollouts;
  state.same = 0;
  if (b) while (state.same < Math.min(a.n, b.n) && a.ids[state.same] === b.ids[state.same]) state.same++;
  $("difference-field").hidden = !b;
  if (!b) state.difference = $("difference").checked = false;
  state.panes = rollouts.map((rollout) => buildPane(rollout, b && state.same));
  $("panes").replaceChildren(...state.panes.map((pane) => pane.node));
  if (two && !b) $("panes").append(el("p", { className: "pane" }, `No rollout of ${names[1]} has this prompt.`));
  $("heading").textContent = `Rollout ${row}`;
  renderFacts();
  renderGroup();
  scrollToRow(row);
  renderList();
  paint();
  state.rank = token === null ? -1 : worstTokens().indexOf(token); // n continues from here
  if (token === null) $("detail").scrollTop = 0;
  else focusToken(0, token, focus);
}

function renderFacts() {
  $("facts").replaceChildren(...(two ? [] : facts(0, state.row)));
  for (const { facts: box, rollout } of state.panes) box.replaceChildren(...facts(rollout.side, rollout.row));
}

function facts(side, row) {
  const out = [];
  const add = (label, value, unit = "") => { if (!Number.isNaN(value)) out.push(el("span", {}, `${label} `, el("b", {}, short(value)), unit && ` ${unit}`)); };
  out.push(el("span", {}, "prompt ", el("b", {}, String(sides[side].prompts[row]))));
  add("reward", reward(side, row));
  for (const name of partNames) add(name, partOf(side, name, row));
  for (const quantity of numeric) if (["kl", "mismatch"].includes(quantity.name)) add(quantity.name === "kl" ? "KL" : "mismatch", meanOf(side, quantity, row), "nats/token");
  add("answer", scoredTokens(side, row), "tokens");
  if (!["kl", "mismatch"].includes(state.quantity.name) && numeric.includes(state.quantity)) add(`mean ${state.quantity.name.replace("_", " ")}`, meanOf(side, state.quantity, row), state.quantity.unit);
  return out;
}

function buildPane(rollout, same) {
  const { side, row, n, ids, flags, starts } = rollout;
  const tokens = el("div", { className: "tokens", role: "listbox", "aria-label": `Tokens of rollout ${row}${two ? `, ${names[side]}` : ""}`, "aria-orientation": "horizontal" });
  const spans = new Array(n), all = document.createDocumentFragment();
  for (let i = 0; i < n; i++) {
    const text = shownOf(ids[i]), broken = text.endsWith("\n"); // a line break outside the token keeps its outline on one line
    if (i && same === i) all.append(el("span", { className: "mark", "aria-hidden": "true" }, "differs from here"));
    if (starts.includes(i)) all.append(el("span", { className: "mark", "aria-hidden": "true" }, starts.length > 1 ? `turn ${starts.indexOf(i) + 1}` : "answer"));
    const span = el("span", { role: "option", tabIndex: -1 }, broken ? text.slice(0, -1) : text);
    span.dataset.i = i;
    all.append(span, ...(broken ? [el("br", { className: flags[i] & 1 ? "" : "out" })] : []));
    spans[i] = span;
  }
  tokens.append(all);
  tokens.dataset.side = side;
  if (n) spans[rollout.scored[0] ?? 0].tabIndex = 0;
  const node = el("article", { className: "pane" }), box = el("span", { className: "facts" });
  if (two) {
    const agree = same === n ? "the same tokens" : same ? `the first ${same} tokens agree` : "";
    node.append(el("h3", {}, el("b", {}, `${names[side]} · rollout ${row}`), box, agree));
  }
  node.append(tokens);
  return { node, tokens, spans, rollout, facts: box };
}

/** The number that colours a token: the quantity's, or its change from the first batch to the second. */
function colourValue(rollout, i) {
  if (!state.difference) return valueAt(rollout, state.quantity, i);
  if (i >= state.same) return NaN;
  const [a, b] = state.panes.map((pane) => valueAt(pane.rollout, state.quantity, i));
  return Math.fround(b - a);
}
function colourScale() {
  if (!state.difference) return state.quantity.scale;
  const { rollout } = state.panes[0], sizes = rollout.scored.map((i) => Math.abs(colourValue(rollout, i))).filter(Number.isFinite).sort((a, b) => a - b);
  return nice(sizes[Math.ceil(0.98 * (sizes.length - 1))] ?? 0) || 1;
}

function paint() {
  const { quantity, threshold } = state, scale = colourScale();
  for (const { spans, rollout } of state.panes) {
    const hits = hitsOf(rollout);
    for (let i = 0; i < rollout.n; i++) spans[i].className = `t ${tokenClass(rollout, quantity, threshold, scale, i)}${special.has(rollout.ids[i]) ? " special" : ""}${hits.has(i) ? " hit" : ""}`;
  }
  renderLegend(scale);
  renderTrack(scale);
}

function tokenClass(rollout, quantity, threshold, scale, i) {
  const flags = rollout.flags[i];
  if (!(flags & 1)) return "out";
  if (quantity.name === "mask") return "w2";
  if (quantity.name === "clipped") return flags & 4 ? "w5 gone" : flags & 2 ? "c2" : "";
  const value = colourValue(rollout, i);
  if (Number.isNaN(value)) return "none";
  return threshold !== null && Math.abs(value) < threshold ? "weak" : stepClass(stepOf(value, scale));
}

function hitsOf(rollout) {
  const hits = new Set(), query = state.query.toLowerCase();
  if (!query) return hits;
  const { text, starts } = textOf(rollout.side, rollout.row);
  for (let at = text.indexOf(query), i = 0; at >= 0; at = text.indexOf(query, at + query.length)) {
    while (i < starts.length && starts[i] < at && (starts[i + 1] ?? Infinity) <= at) i++;
    for (let j = i; j < starts.length && starts[j] < at + query.length; j++) hits.add(j);
  }
  return hits;
}

function renderLegend(scale) {
  const { quantity } = state, parts = [];
  const swatch = (name, label) => el("span", { className: `swatch ${name}` }, label);
  if (quantity.name === "mask") parts.push(swatch("w2", "scored"));
  else if (quantity.name === "clipped") parts.push(swatch("", "inside"), swatch("c2", "outside, with gradient"), swatch("w5", "clipped: no gradient"));
  else {
    const bar = el("span", { className: "scale" }), signed = quantity.kind !== "size" || state.difference;
    for (let step = signed ? -meta.steps : 0; step <= meta.steps; step++) {
      const edge = short((step * scale) / meta.steps);
      bar.append(el("span", { className: stepClass(step) }, step === meta.steps ? `≥ ${edge}` : step === -meta.steps ? `≤ ${edge}` : edge));
    }
    parts.push(bar, quantity.unit);
  }
  const change = state.difference ? `${names[1]} minus ${names[0]}: ` : "";
  parts.push(el("span", {}, `${change}${quantity.label}${quantity.note && `, ${quantity.note}`}`), el("span", { className: "t out" }, "outside the mask"));
  $("legend").replaceChildren(...parts);
}

// ------------------------------------------------------------------ charts

function renderCharts() {
  const { name, label, unit, sizes } = state.quantity, title = sizes ? `${label}, absolute` : label;
  const of = (part) => sides.map((side) => side[part][name] ?? new Float32Array(0));
  const positions = of("positions"), turns = of("turns"), last = Math.max(...positions.map((values) => values.length)) * meta.binWidth;
  const key = two ? ` (${names[0]} solid, ${names[1]} dashed)` : "";
  $("overview").querySelector("summary").textContent = `All rollouts: mean of ${title}${key}`;
  lineChart($("by-position"), `Mean of ${title} by position in the answer`, positions, `token ${last}`, unit);
  lineChart($("by-turn"), `Mean of ${title} by turn`, turns, `turn ${Math.max(...turns.map((values) => values.length))}`, unit);
  const known = numeric.includes(state.quantity);
  for (const id of ["by-position", "by-turn"]) $(id).parentElement.hidden = !known;
  if (!known) $("overview").querySelector("summary").textContent = `All rollouts${key}`;
  $("rewards-figure").hidden = !hasReward;
  if (hasReward) histogram($("rewards"), "Number of rollouts by reward", sides.map((side) => side.stats.subarray(0, side.count)));
  $("overview").hidden = !known && !hasReward;
}

/** The open rollout, token by token. */
function renderTrack(scale) {
  const svg = $("track"), pane = state.panes[0];
  const shown = pane && pane.rollout.n && state.quantity.kind !== "category";
  svg.parentElement.hidden = !shown;
  if (!shown) return;
  const { rollout } = pane, { width, height } = clear(svg, `${state.quantity.label} of each token of the rollout`), x = (i) => ((i + 0.5) / rollout.n) * width;
  let low = 0, high = 0, up = "", below = "";
  for (const i of rollout.scored) { const value = colourValue(rollout, i); if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); } }
  if (low === high) high = scale;
  const y = (value) => 2 + ((high - Math.max(low, Math.min(high, value))) / (high - low)) * (height - 4);
  rollout.starts.forEach((start) => {
    let end = start;
    while (end < rollout.n && rollout.turns[end] === rollout.turns[start]) end++;
    draw(svg, "rect", { class: "band", x: x(start - 0.5), width: x(end) - x(start), y: 0, height, rx: 3 });
  });
  for (const i of rollout.scored) {
    const value = colourValue(rollout, i);
    if (!value) continue;
    const stem = `M${x(i).toFixed(1)} ${y(0).toFixed(1)}V${y(value).toFixed(1)}`;
    value > 0 ? (up += stem) : (below += stem);
  }
  const thick = Math.max(1, Math.min(6, (width / rollout.n) * 0.7));
  for (const [name, d] of [["stem", up], ["stem negative", below]]) draw(svg, "path", { class: name, d, "stroke-width": thick });
  draw(svg, "text", { x: 2, y: 10 }, `${short(high || low)} ${state.quantity.unit}`);
  if (state.token) draw(svg, "line", { class: "here", x1: x(state.token.i), x2: x(state.token.i), y1: 0, y2: height });
}

// ------------------------------------------------------------------ one token

function tokenFrom(target) {
  const span = target.closest?.(".tokens [data-i]");
  return span && { pane: state.panes.find((pane) => pane.tokens === span.parentElement), i: Number(span.dataset.i), span };
}

function focusToken(paneAt, i, focus = true) {
  const pane = state.panes[paneAt], span = pane?.spans[i];
  if (!span) return;
  if (!(pane.rollout.flags[i] & 1) && document.body.classList.contains("plain")) togglePlain();
  span.scrollIntoView({ block: "center" });
  if (focus) span.focus({ preventScroll: true }); else showCard({ pane, i, span });
}

function showCard({ pane, i, span }) {
  const { rollout } = pane, id = rollout.ids[i], card = $("card");
  for (const old of document.querySelectorAll(".twin")) old.classList.remove("twin");
  const twin = state.panes.length === 2 && i < state.same ? state.panes.find((other) => other !== pane) : null;
  twin?.spans[i].classList.add("twin");
  const shown = twin ? state.panes.map((other) => other.rollout) : [rollout];
  const where = [`token ${i + 1} of ${rollout.n}`];
  if (rollout.places[i] >= 0) where.push(`${rollout.places[i] + 1} of the answer`, ...(rollout.starts.length > 1 ? [`turn ${rollout.turns[i] + 1}`] : []));
  else where.push("outside the mask");
  const rank = pane === state.panes[0] ? worstTokens().indexOf(i) : -1;
  if (rank >= 0) where.push(`worst ${rank + 1} of ${state.worst.length}`);
  const table = el("dl", { className: twin ? "two" : "" });
  const line = (name, label, values, unit = "") => {
    if (values.every(Number.isNaN)) return;
    table.append(el("dt", { className: name === state.quantity.name ? "chosen" : "" }, label, el("small", {}, unit && ` ${unit}`)));
    values.forEach((value, k) => {
      const cell = el("dd", {}, exact(value));
      cell.dataset.name = name;
      cell.dataset.side = shown[k].side;
      table.append(cell);
    });
  };
  if (twin) table.append(el("dt"), ...names.map((name) => el("dd", {}, name)));
  for (const [name, label, unit] of meta.columns) line(name, label, shown.map((one) => one.columns[name][i]), unit);
  for (const quantity of numeric) if (quantity.of.length === 2) line(quantity.name, quantity.name, shown.map((one) => valueAt(one, quantity, i)), quantity.unit);
  if (rollout.flags[i] & 1) line("reward", "reward of the rollout", shown.map((one) => reward(one.side, one.row)));
  if (rollout.flags[i] & 2) where.push(rollout.flags[i] & 4 ? "clipped" : "outside the clip range, with gradient");
  const text = shownOf(id);
  const data = el("p", { className: "where" }, `id ${meta.tokenIds[id]} · ${where.join(" · ")}`);
  card.replaceChildren(el("p", { className: "text" }, text.length > 160 ? `${text.slice(0, 160)}… (${text.length} characters)` : text === " " ? "␣" : text), data, table);
  card.className = twin ? "wide" : "";
  card.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect(), { width, height } = card.getBoundingClientRect();
  const below = box.bottom + 8 + height < innerHeight;
  card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  card.style.top = `${Math.max(8, below ? box.bottom + 8 : box.top - height - 8)}px`;
  return `${text.slice(0, 60)}, ${data.textContent}`;
}
function hideCard() {
  $("card").hidden = true;
  for (const old of document.querySelectorAll(".twin")) old.classList.remove("twin");
}

/** Positions in the open rollout, the largest absolute number first. Clipped tokens are in text order. */
function worstTokens() {
  if (state.worst) return state.worst;
  const { rollout } = state.panes[0], { quantity } = state;
  if (quantity.name === "clipped") return (state.worst = rollout.scored.filter((i) => rollout.flags[i] & 4));
  const sizes = new Map(rollout.scored.map((i) => [i, quantity.kind === "row" ? NaN : Math.abs(colourValue(rollout, i))]));
  return (state.worst = rollout.scored.filter((i) => sizes.get(i) >= 0).sort((a, b) => (sizes.get(a) === sizes.get(b) ? a - b : sizes.get(b) - sizes.get(a))));
}
function goWorst(step) {
  if (!state.panes.length || !worstTokens().length) return;
  state.rank = Math.max(0, Math.min(state.worst.length - 1, state.rank + step));
  focusToken(0, state.worst[state.rank]);
}

function goRollout(step) {
  const at = state.order.indexOf(state.row);
  const next = at < 0 ? 0 : Math.max(0, Math.min(state.order.length - 1, at + step));
  if (state.order.length) open(state.order[next]);
}

function goHit() {
  const pane = state.panes[0], hits = pane ? [...hitsOf(pane.rollout)].sort((a, b) => a - b) : [];
  if (hits.length) { state.hit = (state.hit + 1) % hits.length; focusToken(0, hits[state.hit], false); }
}
