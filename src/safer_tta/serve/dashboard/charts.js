// The charts of a stream, drawn as SVG.

import { batches, byId, count, el, fixed, known, most, percent, range, setRows, setText, shortened, sum, svg } from "/dashboard/words.js";

const ROLLING = 10; // labelled batches in the rolling accuracy, and batches in the class shares
const MOST_CLASSES = 12; // bars; the other classes share one more
const HEIGHT = 200; // px of a chart

// ---- Charts: each returns a function that draws it, words, a legend and a table; or why there is nothing to draw

export const CHARTS = {
  "chart-accuracy": ["Rolling accuracy", accuracyChart],
  "chart-reliability": ["Reliability of the views", reliabilityChart],
  "chart-suspicion": ["Suspicion of the images", suspicionChart],
  "chart-dropped": ["Dropped views", droppedChart],
  "chart-classes": ["Classes answered", classesChart],
};
const NO_BATCHES = "no batches yet";
const viewName = (view) => (view === 0 ? "original" : `view ${view}`); // the operators of a view change every batch
const inWords = (bars) => bars.map((bar) => `${bar.name} ${percent(bar.value, 0)}`).join(", ");
const shares = (counts) => counts.map((value) => (100 * value) / (sum(counts) || 1));

/** The mean of a figure over reports, weighted by their images. */
function meanOf(reports, figure) {
  const images = sum(reports.map((report) => report.images)) || 1;
  return sum(reports.map((report) => figure(report) * report.images)) / images;
}

function accuracyChart(reports) {
  const usable = reports.filter((report) => known(report.accuracy));
  if (!usable.length) return "no labels posted";
  const window = (end) => usable.slice(Math.max(0, end - ROLLING + 1), end + 1);
  const rolling = usable.map((_, end) => meanOf(window(end), (report) => report.accuracy));
  const lines = [
    { name: "each batch", kind: "faint", ys: usable.map((report) => report.accuracy) },
    { name: `mean of ${ROLLING} labelled batches`, kind: "main", ys: rolling },
  ];
  return {
    words: `${batches(usable.length)} with labels; over the last ${ROLLING}: ${percent(rolling.at(-1))}.`,
    draw: (width) => lineChart(width, usable, lines, { low: 0, high: 100, digits: 0, y: "accuracy, %" }),
    legend: lines.map(lineMark),
    head: ["batch", "accuracy, %", "rolling, %"],
    rows: usable.map((report, place) => [report.number, fixed(report.accuracy, 1), fixed(rolling[place], 1)]),
  };
}

function reliabilityChart(reports) {
  const usable = reports.filter((report) => report.reliability);
  if (!usable.length) return reports.length ? "this predictor reports no reliability" : NO_BATCHES;
  const kind = (view) => (view ? `k${((view - 1) % 6) + 1}` : "main");
  const views = range(most(usable.map((report) => report.reliability.length)));
  const ys = (view) => usable.map((report) => report.reliability[view]);
  const lines = views.map((view) => ({ name: viewName(view), kind: kind(view), ys: ys(view) }));
  const first = usable[0].number;
  const low = Math.min(0, ...usable.flatMap((report) => report.reliability).filter(known));
  const last = lines.map((line) => `${line.name} ${fixed(line.ys.at(-1), 2)}`).join(", ");
  const axis = { low: Math.floor(low * 4) / 4, high: 1, digits: 2, y: "reliability" };
  return {
    words: `${count(views.length, "view")}, batches ${first} to ${usable.at(-1).number}. Last batch: ${last}.`,
    draw: (width) => lineChart(width, usable, lines.toReversed(), axis), // the original last, on top
    legend: lines.map(lineMark),
    head: ["batch", ...lines.map((line) => line.name)],
    rows: usable.map((report) => [report.number, ...views.map((view) => fixed(report.reliability[view], 3))]),
  };
}

function suspicionChart(reports) {
  const usable = reports.map((report) => report.suspicion).filter(Boolean);
  if (!usable.length) return reports.length ? "this predictor reports no suspicion" : NO_BATCHES;
  const last = shares(usable.at(-1).histogram);
  const all = shares(last.map((_, bin) => sum(usable.map((one) => one.histogram[bin]))));
  const bin = (place) => `${(place / 10).toFixed(1)} to ${((place + 1) / 10).toFixed(1)}`;
  const peak = (values) => `most images (${percent(most(values), 0)}) at ${bin(values.indexOf(most(values)))}`;
  const total = usable.length, mean = `mean of the last ${total}`;
  return {
    words: `Last batch: mean ${fixed(usable.at(-1).mean, 2)}, ${peak(last)}. Last ${total} batches: ${peak(all)}.`,
    draw: (width) => columnChart(width, last, all),
    legend: [blockMark("last batch", ""), blockMark(mean, "hollow")],
    head: ["suspicion", "last batch", mean],
    rows: last.map((share, place) => [bin(place), percent(share), percent(all[place])]),
  };
}

function droppedChart(reports) {
  if (!reports.length) return NO_BATCHES;
  const views = range(most(reports.map((report) => report.views?.length ?? 0)));
  if (views.length < 2) return "there is only one view: none can be dropped";
  const dropped = views.map((view) => reports.filter((report) => report.dropped === view).length);
  const bars = views.map((view) => ({ name: viewName(view), value: (100 * dropped[view]) / reports.length }));
  const operators = reports.at(-1).views ?? [];
  return {
    words: `Of ${batches(reports.length)}: ${inWords(bars)}.`,
    draw: (width) => barChart(width, bars, `dropped, % of the last ${batches(reports.length)}`),
    head: ["view", "times", "share", "its operators in the last batch"],
    rows: bars.map((bar, view) => [bar.name, dropped[view], percent(bar.value), operators[view] ?? "–"]),
  };
}

function classesChart(reports, className) {
  const recent = reports.slice(-ROLLING);
  if (!recent.length) return NO_BATCHES;
  const share = (label) => 100 * meanOf(recent, (report) => report.shares[label]);
  const all = recent[0].shares.map((_, label) => ({ name: className(label), value: share(label) }));
  const bars = largest(all);
  const label = `% of images, last ${batches(recent.length)}`;
  return {
    words: `${label}: ${inWords(bars)}.`,
    draw: (width) => barChart(width, bars, label),
    head: ["class", "share of images"],
    rows: all.map((bar) => [bar.name, percent(bar.value)]),
  };
}

/** All bars in the model's order if they are few; otherwise the largest ones, and one bar for the others. */
function largest(bars) {
  if (bars.length <= MOST_CLASSES) return bars;
  const sorted = bars.toSorted((one, other) => other.value - one.value);
  const rest = sorted.splice(MOST_CLASSES);
  return [...sorted, { name: `${rest.length} others`, value: sum(rest.map((bar) => bar.value)) }];
}

// ---- Drawing: functions that return the parts of an SVG

const text = (x, y, words, anchor = "middle") => svg("text", { x, y, "text-anchor": anchor }, words);
const rule = (x1, x2, y) => svg("line", { x1, x2, y1: y, y2: y, class: "grid" });
const block = (x, y, width, height, kind = "") => svg("rect", { class: `block ${kind}`, x, y, width, height });

/** What line and column charts share: the box, the height of a value, grid lines and labels of both axes. */
function frame(width, { low, high, digits, x, y }) {
  const box = { left: 46, right: width - 12, top: 26, bottom: HEIGHT - 36 };
  const up = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  const values = range(5).map((step) => low + (step / 4) * (high - low));
  const parts = values.map((value) => rule(box.left, box.right, up(value)));
  parts.push(...values.map((value) => text(box.left - 6, up(value) + 4, value.toFixed(digits), "end")));
  parts.push(text((box.left + box.right) / 2, HEIGHT - 4, x), text(0, 12, y, "start"));
  return { box, up, parts };
}

function lineChart(width, reports, lines, axis) {
  const { box, up, parts } = frame(width, { ...axis, x: "batch" });
  const xs = reports.map((report) => report.number);
  const first = xs[0], span = xs.at(-1) - first || 1;
  const along = (x) => box.left + ((x - first) / span) * (box.right - box.left);
  const ticks = new Set([first, xs[Math.floor(xs.length / 2)], xs.at(-1)]);
  for (const tick of ticks) parts.push(text(along(tick), box.bottom + 16, String(tick)));
  const path = (ys) => xs.map((x, place) => step(along(x), ys[place], ys[place - 1], up)).join("");
  for (const line of lines) parts.push(svg("path", { class: `line ${line.kind}`, d: path(line.ys) }));
  return parts;
}

/** A point after a gap starts a line of length 0, which round caps show as a dot. */
function step(x, value, before, up) {
  if (!known(value)) return "";
  const point = `${x.toFixed(1)} ${up(value).toFixed(1)}`;
  return known(before) ? `L${point}` : `M${point}L${point}`;
}

function columnChart(width, last, all) {
  const high = Math.max(20, Math.ceil(most([...last, ...all]) / 20) * 20);
  const { box, up, parts } = frame(width, { low: 0, high, digits: 0, x: "suspicion", y: "images, %" });
  const wide = (box.right - box.left) / last.length;
  const column = (place, value, kind) =>
    block(box.left + place * wide, up(value), 0.36 * wide, box.bottom - up(value), kind);
  last.forEach((value, place) => parts.push(column(place + 0.1, value), column(place + 0.54, all[place], "hollow")));
  for (const edge of range(6)) parts.push(text(box.left + 2 * edge * wide, box.bottom + 16, (edge / 5).toFixed(1)));
  return parts;
}

function barChart(width, bars, label) {
  const left = Math.min(130, 0.35 * width), right = width - 46, pitch = Math.max(20, (HEIGHT - 26) / bars.length);
  const parts = bars.flatMap((bar, place) => {
    const middle = (place + 0.5) * pitch, thick = Math.min(20, 0.65 * pitch);
    const name = text(left - 6, middle + 4, shortened(bar.name, Math.floor(left / 7.5)), "end");
    name.append(svg("title", {}, bar.name));
    const long = (Math.min(bar.value, 100) / 100) * (right - left);
    const figure = text(width, middle + 4, percent(bar.value, 0), "end");
    return [name, rule(left, right, middle), block(left, middle - thick / 2, long, thick), figure];
  });
  return [...parts, text((left + right) / 2, bars.length * pitch + 18, label)];
}

const mark = (name, part) => el("li", {}, svg("svg", { "aria-hidden": "true" }, part), name);
const lineMark = ({ name, kind }) => mark(name, svg("path", { class: `line ${kind}`, d: "M2 6L26 6" }));
const blockMark = (name, kind) => mark(name, block(8, 1, 12, 10, kind));

export function newChart([id, [title]]) {
  const figure = byId("chart").content.firstElementChild.cloneNode(true);
  figure.id = id;
  figure.querySelector("h3").textContent = title;
  figure.querySelector(".scroll").setAttribute("aria-label", `${title}: data`);
  return figure;
}

export function showChart(figure, title, chart) {
  const part = (selector) => figure.querySelector(selector);
  const empty = typeof chart === "string";
  part(".empty").hidden = !empty;
  part(".filled").hidden = empty;
  if (empty) return setText(part(".empty"), chart);
  const width = Math.max(240, part(".plot").clientWidth), parts = chart.draw(width);
  const height = most(parts.map((one) => Number(one.getAttribute("y")))) + 6; // the lowest is the axis' label
  const about = { role: "img", "aria-label": `${title}. ${chart.words}`, viewBox: `0 0 ${width} ${height}`, height };
  part(".plot").replaceChildren(svg("svg", about, ...parts));
  part(".legend").replaceChildren(...(chart.legend ?? []));
  part("thead").replaceChildren(el("tr", {}, ...chart.head.map((name) => el("th", { scope: "col" }, name))));
  return setRows(part("tbody"), chart.rows);
}
