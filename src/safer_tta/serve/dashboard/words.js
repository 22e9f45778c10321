// Helpers that the page and its charts share: elements, and figures as text.

export const byId = (id) => document.getElementById(id);

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
export const el = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Writes only what changed, so that a screen reader does not start again every two seconds. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setRows(body, rows, numeric = []) {
  const text = JSON.stringify(rows);
  if (body.shown === text) return;
  body.shown = text;
  const cell = (value, place) => el("td", numeric.includes(place) ? { class: "number" } : {}, String(value));
  body.replaceChildren(...rows.map((row) => el("tr", {}, ...row.map(cell))));
}

export function setPill(id, text, good) {
  setText(byId(id), text);
  byId(id).className = `pill ${good ? "good" : "bad"}`;
}

export const NO_BATCHES = "no batches yet";
export const known = (value) => typeof value === "number" && Number.isFinite(value);
export const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : "–");
export const percent = (value, digits = 1) => (known(value) ? `${value.toFixed(digits)} %` : "–");
export const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;
export const batches = (number) => count(number, "batch", "batches");
export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const most = (values) => Math.max(0, ...values);
export const range = (length) => Array.from({ length }, (_, place) => place);
export const shortened = (words, length) => (words.length > length ? `${words.slice(0, length - 1)}…` : words);
const times = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
export const clock = (seconds) => (known(seconds) ? times.format(seconds * 1000) : "–");
