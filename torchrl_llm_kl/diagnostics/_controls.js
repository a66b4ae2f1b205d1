// Interaction: controls, keys, saved files, the address, and the start of the page.

// ------------------------------------------------------------------ controls

function choose(quantity) {
  state.quantity = quantity;
  Object.assign(state, { rank: -1, worst: null });
  $("quantity").value = quantity.name;
  $("threshold-unit").textContent = quantity.unit;
  $("threshold").disabled = quantity.kind === "category";
  if (!listColumns().some(([key]) => key === state.sort)) state.sort = "row";
  hideCard();
  refilter();
  renderCharts();
  idsReady.then(renderWorst);
  if (state.panes.length) { renderFacts(); paint(); }
}
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function toggleDark() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  $("dark").setAttribute("aria-pressed", isDark());
}
/** The first token in a direction that is not hidden. */
function shownFrom(spans, i, step) {
  while (spans[i] && !spans[i].getClientRects().length) i += step;
  return i;
}
function togglePlain() {
  const token = tokenFrom(document.activeElement);
  $("plain").setAttribute("aria-pressed", document.body.classList.toggle("plain"));
  const next = token && shownFrom(token.pane.spans, token.i, 1); // the focus would be lost with a hidden token
  if (token && next !== token.i) focusToken(state.panes.indexOf(token.pane), next);
}
function showTab(name) {
  if (name === "prompts") renderPrompts();
  for (const tab of TABS) {
    $(`tab-${tab}`).setAttribute("aria-selected", tab === name);
    $(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
    $(`panel-${tab}`).hidden = tab !== name;
  }
  renderList();
}
function search(text) {
  state.query = text;
  state.hit = -1;
  idsReady.then(() => { refilter(); if (state.panes.length) paint(); });
}

// ------------------------------------------------------------------ files

const textOfRow = (side, row, from = 0, to = sides[side].lengths[row]) => {
  const decoder = new TextDecoder(), out = [];
  for (const id of sides[side].ids.subarray(sides[side].offsets[row] + from, sides[side].offsets[row] + to)) {
    const bytes = meta.bytes[id];
    out.push(bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : decoder.decode() + meta.texts[id]);
  }
  return out.join("") + decoder.decode();
};
/** A rollout's numbers in the list, by name. */
function rowNumbers(row) {
  const found = { row, prompt: sides[0].prompts[row] };
  if (hasReward) found.reward = reward(0, row);
  for (const name of partNames) found[`reward/${name}`] = partOf(0, name, row);
  found.tokens = scoredTokens(0, row);
  for (const quantity of numeric) Object.assign(found, { [`${quantity.name}_mean`]: meanOf(0, quantity, row), [`${quantity.name}_largest`]: largestOf(0, quantity, row) });
  return found;
}
async function saveRollouts(kind) {
  await idsReady;
  const lines = [], columns = Object.keys(rowNumbers(0));
  if (kind === "csv") lines.push([...columns, "text"].map(csvField).join(",") + "\r\n");
  for (const row of state.order) {
    const numbers = rowNumbers(row);
    if (kind === "csv") { lines.push([...Object.values(numbers), textOfRow(0, row)].map(csvField).join(",") + "\r\n"); continue; }
    const rollout = await load(0, row), per = {};
    for (const [name] of meta.columns) per[name] = Array.from(rollout.columns[name], plainNumber);
    const ids = Array.from(rollout.ids, (id) => meta.tokenIds[id]), scored = Array.from(rollout.flags, (flags) => (flags & 1) === 1);
    const plain = Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, plainNumber(value)]));
    lines.push(JSON.stringify({ ...plain, text: textOfRow(0, row), ids, scored, ...per }) + "\n");
  }
  saveAs(`rollouts.${kind}`, kind === "csv" ? "text/csv" : "application/jsonl", lines);
}

// ------------------------------------------------------------------ the address

/** Settings in the address after #: quantity, sort (a column, largest number first, but row in order), row, token. */
async function follow() {
  const asked = new URLSearchParams(location.hash.slice(1)), quantity = quantities.find(({ name }) => name === asked.get("quantity"));
  const order = asked.get("sort");
  if (quantity) choose(quantity);
  if (listColumns().some(([key]) => key === order)) { Object.assign(state, { sort: order, down: order !== "row" }); refilter(); }
  const number = (name) => (/^\d+$/.test(asked.get(name) ?? "") ? Number(asked.get(name)) : -1), row = number("row"), token = number("token");
  const known = row >= 0 && row < sides[0].count;
  if (known || state.order.length) await open(known ? row : state.order[0], known && token >= 0 && token < sides[0].lengths[row] ? token : null);
}

const TABS = ["rollouts", ...(grouped ? ["prompts"] : []), "worst"];
const KEYS = {
  j: () => goRollout(1), k: () => goRollout(-1), n: () => goWorst(1), p: () => goWorst(-1), d: toggleDark, u: togglePlain,
  c: () => choose(quantities[(quantities.indexOf(state.quantity) + 1) % quantities.length]),
  "/": () => { $("search").focus(); $("search").select(); }, "?": () => $("keys").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (event.target.closest("input:not([type=checkbox])")) {
    if (event.key === "Escape") event.target.blur();
    if (event.key === "Enter" && event.target === $("search")) goHit();
    return;
  }
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); return; }
  const token = tokenFrom(event.target), steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  if (token && event.key in steps) {
    event.preventDefault();
    const { spans } = token.pane, on = { Home: 1, End: -1 }[event.key] ?? steps[event.key];
    const i = shownFrom(spans, Math.max(0, Math.min(spans.length - 1, token.i + steps[event.key])), on);
    if (spans[i]) focusToken(state.panes.indexOf(token.pane), i);
  } else if (event.target === $("list") && ["ArrowDown", "ArrowUp"].includes(event.key)) {
    event.preventDefault();
    goRollout(event.key === "ArrowDown" ? 1 : -1);
  } else if (event.key === "Escape") hideCard();
});

$("list").addEventListener("scroll", () => requestAnimationFrame(renderList), { passive: true });
/** Open the clicked rollout. On a narrow screen its tokens replace the list. */
function openClicked(event) {
  const entry = event.target.closest("button[data-row], .row");
  if (!entry) return;
  showMenu(false);
  open(Number(entry.dataset.row), entry.dataset.at === undefined ? null : Number(entry.dataset.at), entry.dataset.at !== undefined);
}
function showMenu(shown) {
  document.body.classList.toggle("menu", shown);
  $("menu").setAttribute("aria-expanded", shown);
  if (shown) renderList();
}
for (const id of ["list", "prompts", "worst", "group"]) $(id).addEventListener("click", openClicked);
$("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu")));
for (const kind of ["jsonl", "csv"]) $(kind).addEventListener("click", () => saveRollouts(kind));
$("prompt-columns").addEventListener("click", (event) => {
  const key = event.target.closest("[data-sort]")?.dataset.sort, [before, down] = state.prompts;
  if (!key) return;
  state.prompts = [key, key === before ? !down : key !== "prompt"];
  renderPrompts();
  $("prompt-columns").querySelector(`[data-sort="${key}"]`).focus();
});
$("columns").addEventListener("click", (event) => {
  const key = event.target.closest("[data-sort]")?.dataset.sort;
  if (!key) return;
  state.down = key === state.sort ? !state.down : key !== "row"; // the largest first
  state.sort = key;
  $("list").scrollTop = 0;
  refilter();
  $("columns").querySelector(`[data-sort="${CSS.escape(key)}"]`).focus();
});
$("quantity").addEventListener("change", (event) => choose(quantities.find((quantity) => quantity.name === event.target.value)));
$("threshold").addEventListener("input", (event) => { state.threshold = event.target.value === "" ? null : Number(event.target.value); refilter(); if (state.panes.length) paint(); });
$("search").addEventListener("input", (event) => search(event.target.value));
$("difference").addEventListener("change", (event) => { state.difference = event.target.checked; Object.assign(state, { rank: -1, worst: null }); paint(); });
$("track").addEventListener("click", (event) => {
  const box = $("track").getBoundingClientRect(), { rollout } = state.panes[0];
  focusToken(0, Math.min(rollout.n - 1, Math.floor(((event.clientX - box.left) / box.width) * rollout.n)));
});
const panes = $("panes");
panes.addEventListener("mouseover", (event) => { const token = tokenFrom(event.target); token ? showCard(token) : hideCard(); });
panes.addEventListener("mouseleave", hideCard);
panes.addEventListener("focusin", (event) => {
  const token = tokenFrom(event.target);
  if (!token) return;
  for (const span of token.pane.tokens.querySelectorAll('[tabindex="0"]')) span.tabIndex = -1;
  token.span.tabIndex = 0;
  state.token = token;
  token.span.setAttribute("aria-label", showCard(token));
  if (token.pane === state.panes[0]) renderTrack(colourScale());
});
panes.addEventListener("focusout", hideCard);
for (const [id, act] of [["dark", toggleDark], ["plain", togglePlain], ["help", KEYS["?"]], ["previous", KEYS.k], ["next", KEYS.j], ["worst-next", KEYS.n], ["worst-previous", KEYS.p]]) $(id).addEventListener("click", act);
$("tab-prompts").hidden = !grouped;
for (const tab of TABS) {
  $(`tab-${tab}`).addEventListener("click", () => showTab(tab));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = TABS[(TABS.indexOf(tab) + (event.key === "ArrowRight" ? 1 : TABS.length - 1)) % TABS.length];
    showTab(other);
    $(`tab-${other}`).focus();
  });
}
new ResizeObserver(() => { renderList(); renderCharts(); if (state.panes.length) renderTrack(colourScale()); }).observe(document.body);

// ------------------------------------------------------------------ start

const total = sides[0].lengths.reduce((sum, length) => sum + length, 0);
$("about").textContent = `${sides[0].count} rollouts, ${total.toLocaleString("en")} tokens` + (two ? `; ${names[0]} beside ${names[1]}${meta.unpaired ? ` (${meta.unpaired} of ${names[1]} without counterpart)` : ""}` : "");
$("quantity").append(...quantities.map((quantity) => el("option", { value: quantity.name }, quantity.label)));
$("dark").setAttribute("aria-pressed", isDark());
choose(quantities[0]);
idsReady.then(redrawList); // with the previews
// The numbers of the rollouts come after the script in the document.
document.addEventListener("DOMContentLoaded", async () => {
  if (innerWidth <= 860) $("overview").open = false; // as in the style sheet
  await follow();
  addEventListener("hashchange", follow);
  document.documentElement.dataset.ready = "";
});
