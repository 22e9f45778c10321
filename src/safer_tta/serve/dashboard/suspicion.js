// The first chart of a stream: how suspicious its images were, batch by batch, and when an alarm was active.

import { block, blockMark, frame, HEIGHT, lineMark, path, places, text, ticks } from "/dashboard/drawing.js";
import { clock, count, fixed, known, NO_BATCHES, percent, setText, svg } from "/dashboard/words.js";

const WIDEST = 18; // px of a column
const LOWER = HEIGHT - 24; // px from the top of the upper panel to that of the lower one

const flagged = (report) => (100 * report.abstained) / report.images;
const overWindow = (report) => (known(report.suspicious) ? 100 * report.suspicious : null);
const isAlarmed = (report) => Boolean(report.alarms?.length);

export function overTimeChart(reports, _className, model) {
  const usable = reports.filter((report) => report.suspicion);
  if (!usable.length) return reports.length ? "this predictor does not estimate suspicion, so attacks are not noticed" : NO_BATCHES;
  const means = { name: "mean of the batch", kind: "main", ys: usable.map((report) => report.suspicion.mean) };
  const shares = { name: "suspicious, of the last 256 images", kind: "k1 thick", ys: usable.map(overWindow) };
  return {
    words: wordsOf(usable.at(-1)),
    draw: (width) => [...upperPanel(width, usable, means, model?.abstain), ...lowerPanel(width, usable, shares)],
    legend: [lineMark(means), blockMark("flagged in the batch", "flag"), lineMark(shares), blockMark("alarm active", "span")],
    head: ["batch", "time", "mean", "median", "flagged", "share flagged", "of the last 256", "alarm"],
    rows: usable.map(rowOf).reverse(),
    readout: (place) => readoutOf(usable[place]),
    xs: (width) => places(width, usable),
    numbers: usable.map((report) => report.number),
  };
}

function rowOf(report) {
  const { mean, median } = report.suspicion;
  return [report.number, clock(report.time), fixed(mean, 3), fixed(median, 3), report.abstained,
    percent(flagged(report)), percent(overWindow(report)), isAlarmed(report) ? "active" : "no"];
}

function wordsOf(report) {
  const window = known(report.suspicious) ? ` ${percent(overWindow(report), 0)} of the last 256 images are suspicious.` : "";
  const batch = `${report.abstained} of ${count(report.images, "image")} flagged`;
  return `Last batch: mean ${fixed(report.suspicion.mean, 2)}, ${batch}.${window}`;
}

function readoutOf(report) {
  const { mean, median } = report.suspicion;
  const parts = [`Batch ${report.number}, ${clock(report.time)}`, `mean ${fixed(mean, 2)}, median ${fixed(median, 2)}`,
    `${report.abstained} of ${report.images} flagged`];
  if (known(report.suspicious)) parts.push(`${percent(overWindow(report), 0)} of the last 256 suspicious`);
  return [...parts, isAlarmed(report) ? "alarm active" : "no alarm"].join(" · ");
}

// ---- Drawing

function upperPanel(width, reports, means, limit) {
  const { box, up, parts } = frame(width, { low: 0, high: 1, digits: 2, x: "", y: "suspicion" });
  const xs = places(width, reports);
  const threshold = known(limit) ? [
    svg("line", { class: "limit", x1: box.left, x2: box.right, y1: up(limit), y2: up(limit) }),
    text(box.right, 12, `dashed: images above ${fixed(limit, 2)} are flagged`, "end"),
  ] : [];
  return [...spans(xs, reports, box), ...parts, ...threshold, path(means, xs, up)];
}

function lowerPanel(width, reports, shares) {
  const axis = { low: 0, high: 100, digits: 0, x: "batch", y: "images flagged, %", top: LOWER };
  const { box, up, parts } = frame(width, axis);
  const xs = places(width, reports), wide = Math.min(WIDEST, (0.7 * (box.right - box.left)) / reports.length);
  const column = (report, place) => {
    const left = Math.max(xs[place] - wide / 2, box.left), right = Math.min(xs[place] + wide / 2, box.right);
    return block(left, up(flagged(report)), right - left, box.bottom - up(flagged(report)), "flag");
  };
  const under = spans(xs, reports, box);
  return [...under, ...parts, ...reports.map(column), path(shares, xs, up), ...ticks(xs, reports, box.bottom + 16)];
}

/** Bands behind the chart where an alarm was active: from the batch that raised it to the one that cleared it. */
function spans(xs, reports, box) {
  const starts = reports.map((report, place) => isAlarmed(report) && !(place && isAlarmed(reports[place - 1])));
  return [...starts.keys()].filter((place) => starts[place]).flatMap((first) => {
    const end = reports.findIndex((report, place) => place > first && !isAlarmed(report));
    const right = Math.max(end < 0 ? box.right : xs[end], xs[first] + 2);
    const label = text(xs[first] + 4, box.top + 13, "alarm", "start");
    return [block(xs[first], box.top, right - xs[first], box.bottom - box.top, "span"), label];
  });
}

// ---- What the pointer is over

/** Shows the figures of the batch under the pointer, or of the last batch if there is none. */
export function showReadout(figure, chart, width) {
  const line = figure.querySelector(".readout"), plot = figure.querySelector(".plot");
  line.hidden = !chart.readout;
  plot.onpointermove = plot.onpointerleave = null;
  if (!chart.readout) return;
  const xs = chart.xs(width), image = plot.firstElementChild;
  const guide = svg("line", { class: "guide", y1: 26, y2: LOWER + HEIGHT - 36, visibility: "hidden" });
  image.append(guide);
  const show = (place) => {
    setText(line, chart.readout(place < 0 ? xs.length - 1 : place));
    guide.setAttribute("visibility", place < 0 ? "hidden" : "visible");
    for (const end of place < 0 ? [] : ["x1", "x2"]) guide.setAttribute(end, xs[place]);
  };
  plot.onpointermove = (event) => {
    const box = image.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
    const distances = xs.map((other) => Math.abs(other - x));
    const place = distances.indexOf(Math.min(...distances));
    figure.hovered = chart.numbers[place]; // a new drawing shows the same batch
    show(place);
  };
  plot.onpointerleave = () => show((figure.hovered = -1));
  show(chart.numbers.indexOf(figure.hovered));
}
