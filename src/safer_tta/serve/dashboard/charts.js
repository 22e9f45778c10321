// The charts of a stream: what each shows, in words, as a drawing and as a table.

import { barChart, blockMark, columnChart, lineChart, lineMark } from "/dashboard/drawing.js";
import { overTimeChart, showReadout } from "/dashboard/suspicion.js";
import { batches, byId, count, el, fixed, known, most, NO_BATCHES, percent, range, setRows, setText, sum, svg } from "/dashboard/words.js";

const ROLLING = 10; // labelled batches in the rolling accuracy, and batches in the class shares
const MOST_CLASSES = 12; // bars; the other classes share one more

// ---- Charts: each returns a function that draws it, words, a legend and a table; or why there is nothing to draw

export const CHARTS = {
  "chart-over-time": ["Suspicion over time", overTimeChart],
  "chart-accuracy": ["Rolling accuracy", accuracyChart],
  "chart-reliability": ["Reliability of the views", reliabilityChart],
  "chart-suspicion": ["How suspicion is distributed", suspicionChart],
  "chart-dropped": ["Dropped views", droppedChart],
  "chart-classes": ["Classes answered", classesChart],
};
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

// ---- The figure around a chart

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
  showReadout(figure, chart, width);
  part(".legend").replaceChildren(...(chart.legend ?? []));
  part("thead").replaceChildren(el("tr", {}, ...chart.head.map((name) => el("th", { scope: "col" }, name))));
  return setRows(part("tbody"), chart.rows);
}
