"use strict";
// Functions that are independent of the page: decoding, formatting of numbers, elements and charts.

function bytesOf(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}
const floats = (text) => new Float32Array(bytesOf(text).buffer);

async function inflated(id) {
  const packed = new Blob([bytesOf(document.getElementById(id).textContent)]);
  return new Uint8Array(await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate-raw"))).arrayBuffer());
}

/** Restore four-byte numbers from their byte planes. */
function joined(planes, from, count) {
  const out = new Uint8Array(4 * count);
  for (let k = 0; k < 4; k++) for (let i = 0; i < count; i++) out[4 * i + k] = planes[from + k * count + i];
  return out.buffer;
}

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) name in node ? (node[name] = value) : node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function draw(parent, tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
/** The shortest decimal that is this float32. */
function exact(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : value > 0 ? "∞" : "-∞";
  for (let digits = 1; digits < 9; digits++) if (Math.fround(value.toPrecision(digits)) === value) return String(Number(value.toPrecision(digits)));
  return String(Number(value.toPrecision(9)));
}
function short(value) {
  if (!Number.isFinite(value)) return exact(value);
  const size = Math.abs(value);
  return size && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}
/** Round up to a number whose fifth is also round. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return value && [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => Number((factor * power).toPrecision(3))).find((rounded) => rounded >= value);
}

function clear(svg, label) {
  const width = svg.clientWidth || 600, height = svg.clientHeight || 104;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  return { width, height };
}

/** Draw one line for each batch, and a dot where a point has no neighbour. */
function lineChart(svg, label, series, xLabel, unit) {
  const { width, height } = clear(svg, label), left = 44, right = 8, top = 8, bottom = 18;
  const known = series.flatMap((values) => Array.from(values).filter(Number.isFinite));
  if (!known.length) return void draw(svg, "text", { x: left, y: height / 2 }, "no numbers");
  let low = Math.min(0, ...known), high = Math.max(0, ...known);
  if (low === high) high = low + 1;
  const count = Math.max(...series.map((values) => values.length));
  const x = (i) => left + ((i + 0.5) / count) * (width - left - right), y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  draw(svg, "line", { class: "axis", x1: left, x2: width - right, y1: y(0), y2: y(0) });
  for (const value of new Set([low, high])) draw(svg, "text", { x: left - 6, y: y(value) + 3, "text-anchor": "end" }, short(value));
  draw(svg, "text", { x: left, y: height - 4 }, unit);
  draw(svg, "text", { x: width - right, y: height - 4, "text-anchor": "end" }, xLabel);
  series.forEach((values, k) => {
    let path = "";
    for (let i = 0; i < values.length; i++) {
      if (!Number.isFinite(values[i])) continue;
      path += `${Number.isFinite(values[i - 1]) ? "L" : "M"}${x(i).toFixed(1)} ${y(values[i]).toFixed(1)}`;
      if (values.length < 12) draw(svg, "circle", { class: k ? "dot b" : "dot", cx: x(i), cy: y(values[i]), r: 3 });
    }
    draw(svg, "path", { class: k ? "series b" : "series", d: path });
  });
}

/** Mean, sample standard deviation, smallest and largest of the known numbers. */
function spread(values) {
  const known = values.filter((value) => !Number.isNaN(value)), n = known.length;
  const mean = known.reduce((sum, value) => sum + value, 0) / n;
  const deviation = n > 1 ? Math.sqrt(known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1)) : NaN;
  return { n, mean, deviation, low: Math.min(...known), high: Math.max(...known) };
}

/** Count the numbers of each batch in 20 bins, or at each value if there are few values. */
function histogram(svg, label, series) {
  const { width, height } = clear(svg, label), left = 32, right = 8, top = 12, bottom = 18;
  const all = series.flatMap((values) => Array.from(values).filter(Number.isFinite));
  if (!all.length) return void draw(svg, "text", { x: left, y: height / 2 }, "no numbers");
  const { low, high } = spread(all), values = [...new Set(all)].sort((a, b) => a - b), few = values.length < 12;
  const bins = few ? values.length : 20, at = (value) => (few ? values.indexOf(value) : Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins)));
  const counts = series.map((numbers) => {
    const found = new Array(bins).fill(0);
    for (const value of numbers) if (Number.isFinite(value)) found[at(value)]++;
    return found;
  });
  const most = Math.max(...counts.flat()), step = (width - left - right) / bins, thick = Math.min(40, step * 0.8) / series.length;
  const y = (count) => height - bottom - (count / most) * (height - top - bottom);
  counts.forEach((found, k) => found.forEach((count, i) => {
    if (count) draw(draw(svg, "rect", { class: k ? "bar-b" : "bar-a", x: left + step * (i + 0.5) + thick * (k - series.length / 2), y: y(count), width: thick, height: height - bottom - y(count) }), "title", {}, `${count} rollouts${few ? ` with ${short(values[i])}` : ""}`);
  }));
  draw(svg, "line", { class: "axis", x1: left, x2: width - right, y1: y(0), y2: y(0) });
  draw(svg, "text", { x: left - 6, y: y(most) + 4, "text-anchor": "end" }, String(most));
  const ticks = few && bins * 40 < width ? values.map((value, i) => [left + step * (i + 0.5), value, "middle"]) : [[left, low, "start"], [width - right, high, "end"]];
  for (const [x, value, anchor] of ticks) draw(svg, "text", { x, y: height - 4, "text-anchor": anchor }, short(value));
}

/** Convert a number for JSON, which has no NaN and no infinity. */
const plainNumber = (value) => (Number.isFinite(value) ? Number(exact(value)) : Number.isNaN(value) ? null : value > 0 ? "Infinity" : "-Infinity");
/** A field of a CSV file. Text that begins like a formula is escaped, since a spreadsheet would run it. */
function csvField(value) {
  if (typeof value === "number") return Number.isNaN(value) ? "" : exact(value).replace("∞", "inf");
  return `"${(/^[=+\-@\t\r]/.test(value) ? "'" + value : value).replaceAll('"', '""')}"`;
}
function saveAs(name, type, parts) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
