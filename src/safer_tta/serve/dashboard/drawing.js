// Parts of charts, as SVG: axes, lines, columns and bars.

import { el, known, most, percent, range, shortened, svg } from "/dashboard/words.js";

export const HEIGHT = 200; // px of a chart, or of a panel of one
const EDGES = { left: 46, right: 12 }; // px beside a panel

export const text = (x, y, words, anchor = "middle") => svg("text", { x, y, "text-anchor": anchor }, words);
const rule = (x1, x2, y) => svg("line", { x1, x2, y1: y, y2: y, class: "grid" });
export const block = (x, y, width, height, kind = "") => svg("rect", { class: `block ${kind}`, x, y, width, height });

/** What line and column charts share: the box, the height of a value, grid lines and labels of both axes. */
export function frame(width, { low, high, digits, x, y, top = 0 }) {
  const box = { left: EDGES.left, right: width - EDGES.right, top: top + 26, bottom: top + HEIGHT - 36 };
  const up = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  const values = range(5).map((step) => low + (step / 4) * (high - low));
  const parts = values.map((value) => rule(box.left, box.right, up(value)));
  parts.push(...values.map((value) => text(box.left - 6, up(value) + 4, value.toFixed(digits), "end")));
  parts.push(text((box.left + box.right) / 2, top + HEIGHT - 4, x), text(0, top + 12, y, "start"));
  return { box, up, parts };
}

/** Where each batch is along the axis, in px. */
export function places(width, reports) {
  const first = reports[0].number, span = reports.at(-1).number - first || 1;
  return reports.map(({ number }) => EDGES.left + ((number - first) / span) * (width - EDGES.left - EDGES.right));
}

/** The numbers of the first, the middle and the last batch, below the axis. */
export function ticks(xs, reports, y) {
  const shown = new Set([0, Math.floor(xs.length / 2), xs.length - 1]);
  return [...shown].map((place) => text(xs[place], y, String(reports[place].number)));
}

export function path({ kind, ys }, xs, up) {
  return svg("path", { class: `line ${kind}`, d: xs.map((x, place) => step(x, ys[place], ys[place - 1], up)).join("") });
}

export function lineChart(width, reports, lines, axis) {
  const { box, up, parts } = frame(width, { ...axis, x: "batch" });
  const xs = places(width, reports);
  return [...parts, ...ticks(xs, reports, box.bottom + 16), ...lines.map((line) => path(line, xs, up))];
}

/** A point after a gap starts a line of length 0, which round caps show as a dot. */
function step(x, value, before, up) {
  if (!known(value)) return "";
  const point = `${x.toFixed(1)} ${up(value).toFixed(1)}`;
  return known(before) ? `L${point}` : `M${point}L${point}`;
}

export function columnChart(width, last, all) {
  const high = Math.max(20, Math.ceil(most([...last, ...all]) / 20) * 20);
  const { box, up, parts } = frame(width, { low: 0, high, digits: 0, x: "suspicion", y: "images, %" });
  const wide = (box.right - box.left) / last.length;
  const column = (place, value, kind) =>
    block(box.left + place * wide, up(value), 0.36 * wide, box.bottom - up(value), kind);
  last.forEach((value, place) => parts.push(column(place + 0.1, value), column(place + 0.54, all[place], "hollow")));
  for (const edge of range(6)) parts.push(text(box.left + 2 * edge * wide, box.bottom + 16, (edge / 5).toFixed(1)));
  return parts;
}

export function barChart(width, bars, label) {
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
export const lineMark = ({ name, kind }) => mark(name, svg("path", { class: `line ${kind}`, d: "M2 6L26 6" }));
export const blockMark = (name, kind) => mark(name, block(8, 1, 12, 10, kind));
