// The service's dashboard: streams, their reports as charts, and what can be done to them. The API is docs/serve.md.
// Text from the server reaches the page as text nodes and attributes alone, never as markup.

const REFRESH = 2_000; // ms between two looks at the streams
const LAST = 100; // batches the charts look back
const ROLLING = 10; // labelled batches in the rolling accuracy, and batches in the class shares
const SILENCE = 40_000; // the feed says something every 15 s; after this long it is taken for dead
const AUDITED = 20;
const MOST_CLASSES = 12; // bars; the rest is one bar more
const HEIGHT = 200; // px of a chart

const state = {
  token: sessionStorage.getItem("token") ?? "",
  model: null,
  streams: [],
  name: null, // the selected stream
  reports: [], // its last batches, oldest first
  loaded: null, // the stream as it was when its reports were last asked for
  feed: null, // AbortController of the live feed
  live: false,
  locked: false, // a token is wanted; nothing is asked until one is given
  troubled: false, // the last look at the server failed
  quietUntil: 0, // the server asked for patience until then
  turn: 0,
  timer: 0,
  key: "", // Idempotency-Key of the chosen files: sent again after a lost answer, they are learnt from once
};

// ---- Elements ------------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const el = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Only what changed is written, so that a screen reader is not sent back to the start every two seconds. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fillTable(body, rows, numeric = () => false) {
  const cell = (value, place) => el("td", numeric(place) ? { class: "number" } : {}, String(value));
  body.replaceChildren(...rows.map((row) => el("tr", {}, ...row.map(cell))));
}

const known = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : "–");
const percent = (value, digits = 1) => (known(value) ? `${value.toFixed(digits)} %` : "–");
const clock = (seconds) => (known(seconds) ? new Date(seconds * 1000).toLocaleString() : "–");
const count = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const range = (length) => Array.from({ length }, (_, place) => place);

function announce(text, bad = false) {
  byId("status").replaceChildren(el("p", bad ? { class: "bad" } : {}, text));
}

// ---- The API -------------------------------------------------------------------------------------------------------

/** The server's no, in its own words. */
class Refusal extends Error {
  constructor(message, status, wait = 0) {
    super(message);
    Object.assign(this, { status, wait }); // wait: seconds
  }
}

const at = (name) => `/v1/streams/${encodeURIComponent(name)}`;

function retryAfter(value) {
  const seconds = /^\d+(\.\d+)?$/.test(value ?? "") ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return known(seconds) ? Math.max(1, Math.ceil(seconds)) : 5;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const said = typeof body?.error === "string" ? body.error : `The server answered ${response.status} and no reason.`;
  if (response.status !== 429) return new Refusal(said, response.status);
  const wait = retryAfter(response.headers.get("Retry-After"));
  return new Refusal(`${said.replace(/\.?$/, ".")} Try again in ${wait} s.`, 429, wait);
}

async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (state.token) headers.set("Authorization", `Bearer ${state.token}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refusal("The server cannot be reached.", 0);
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function ask(path, options) {
  const response = await request(path, options);
  if (response.status === 204) return null;
  return response.json().catch(() => {
    throw new Refusal("The server's answer could not be read: it is not JSON.", response.status);
  });
}

function failed(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) lock();
  if (error instanceof Refusal) return announce(error.message, true);
  console.error(error); // a fault of this page, or a server of another version
  announce("The dashboard could not show what the server sent. The console says more.", true);
}

// ---- Token ---------------------------------------------------------------------------------------------------------

function showToken(shown) {
  byId("token-form").hidden = !shown;
  byId("token-toggle").setAttribute("aria-expanded", String(shown));
}

function lock() {
  state.locked = true;
  state.feed?.abort();
  showToken(true);
  if (document.activeElement === document.body) byId("token").focus(); // nobody is elsewhere
}

function useToken(token) {
  if (!/^[\x21-\x7e]*$/.test(token)) return announce("A token has no spaces and only plain characters.", true);
  state.token = token;
  if (token) sessionStorage.setItem("token", token);
  else sessionStorage.removeItem("token");
  byId("token").value = "";
  showToken(false);
  byId("token-toggle").focus();
  announce(token ? "The token is used from now on." : "The token is forgotten.");
  state.locked = false;
  state.model = null;
  deselect();
  return refresh();
}

// ---- Looking at the server -----------------------------------------------------------------------------------------

async function refresh() {
  const turn = ++state.turn; // an older look that comes back later shows nothing
  await look(() => turn === state.turn).catch((error) => turn === state.turn && trouble(error));
  if (turn !== state.turn || document.hidden) return;
  clearTimeout(state.timer);
  state.timer = setTimeout(refresh, Math.max(REFRESH, state.quietUntil - Date.now()));
}

async function look(current) {
  const [ready] = await Promise.all([request("/readyz").then(() => "ready", unready), state.model ?? loadModel()]);
  if (!current()) return;
  showServer(ready);
  if (state.locked) return;
  const [{ streams }, { events }] = await Promise.all([ask("/v1/streams"), ask("/v1/audit")]);
  if (!current()) return;
  state.streams = streams;
  showStreams();
  showAudit(events.slice(0, AUDITED));
  await catchUp();
  if (state.troubled) announce("The server answers again.");
  state.troubled = false;
}

const unready = (error) => (error.status ? "not ready" : "unreachable");

/** The same trouble every two seconds is told once. */
function trouble(error) {
  if (error.wait) state.quietUntil = Date.now() + error.wait * 1000;
  state.model = null; // after a restart it may be another
  if (!state.troubled || error.status === 401) failed(error);
  state.troubled = error.status !== 401;
}

function showServer(text) {
  setText(byId("server"), text);
  byId("server").className = `pill ${text === "ready" ? "good" : "bad"}`;
}

async function loadModel() {
  if (state.locked) return;
  const model = await ask("/v1/model");
  state.model = model;
  setText(byId("model-method"), String(model.method));
  setText(byId("model-predictor"), String(model.predictor));
  setText(byId("model-version"), String(model.version).slice(0, 8));
  byId("model-version").title = String(model.version);
}

const className = (label) => String(state.model?.classes?.[label] ?? label);

function showAudit(events) {
  byId("no-audit").hidden = events.length > 0;
  const rows = events.map((event) => [clock(event.time), event.owner ?? "–", event.stream ?? "–", event.what]);
  const text = JSON.stringify(rows);
  if (byId("audit").dataset.shown === text) return;
  byId("audit").dataset.shown = text;
  fillTable(byId("audit"), rows);
}

// ---- Streams -------------------------------------------------------------------------------------------------------

const selected = () => state.streams.find((stream) => stream.name === state.name);

function alarmsOf({ health = {} }) {
  const parts = [[health.collapses, "collapse"], [health.rollbacks, "rollback"]].filter(([number]) => number > 0);
  return parts.map(([number, what]) => count(number, what)).join(", ");
}

function newRow(name) {
  const row = el("tr", { "data-stream": name }, el("th", { scope: "row" }, el("button", { type: "button" }, name)));
  for (const kind of ["", "number", "number", "number", "", "", ""]) row.append(el("td", kind ? { class: kind } : {}));
  return row;
}

function fillRow(row, stream) {
  const alarms = alarmsOf(stream);
  const texts = [stream.owner || "–", String(stream.batches), String(stream.images), percent(stream.accuracy)];
  texts.push(stream.state, stream.frozen ? "frozen" : "no", alarms ? `⚠ ${alarms}` : "none");
  texts.forEach((text, place) => setText(row.cells[place + 1], text));
  row.cells[7].className = alarms ? "alarmed" : "";
  row.setAttribute("aria-selected", String(stream.name === state.name));
}

/** Rows are kept and moved, not made anew: the one with the focus keeps it. */
function showStreams() {
  const body = byId("streams");
  const rows = new Map([...body.rows].map((row) => [row.dataset.stream, row]));
  state.streams.forEach((stream, place) => {
    const row = rows.get(stream.name) ?? newRow(stream.name);
    rows.delete(stream.name);
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
    fillRow(row, stream);
  });
  for (const row of rows.values()) row.remove();
  byId("no-streams").hidden = state.streams.length > 0;
  if (state.name !== null && !selected()) deselect();
  showDetail();
}

function select(name) {
  if (name === state.name) return;
  deselect();
  state.name = name;
  byId("answers").hidden = true;
  showStreams();
  showReports();
  follow();
  announce(`Showing stream ${name}.`);
}

function deselect() {
  state.feed?.abort();
  Object.assign(state, { name: null, reports: [], loaded: null, feed: null, live: false });
}

function showDetail() {
  const stream = selected();
  byId("detail").hidden = !stream;
  byId("no-selection").hidden = Boolean(stream) || state.streams.length === 0;
  if (!stream) return;
  setText(byId("detail-title"), `Stream ${stream.name}`);
  setText(byId("detail-facts"), factsOf(stream));
  swap(byId("freeze"), byId("unfreeze"), stream.frozen);
  setText(byId("feed"), state.live ? "live" : "asking every 2 s");
  byId("feed").className = `pill ${state.live ? "good" : "soft"}`;
  showHealth(stream.health ?? {});
}

function factsOf(stream) {
  const parts = [count(stream.batches, "batch").replace("batchs", "batches"), count(stream.images, "image")];
  parts.push(known(stream.accuracy) ? `accuracy ${percent(stream.accuracy)} of ${stream.labelled} labelled` : "no labels");
  parts.push(stream.frozen ? "frozen: predicts only" : "learning", stream.state, `created ${clock(stream.created)}`);
  return parts.join(" · ");
}

/** One of two buttons is shown; the focus goes along. */
function swap(first, second, useSecond) {
  const focused = document.activeElement === first || document.activeElement === second;
  first.hidden = useSecond;
  second.hidden = !useSecond;
  if (focused) (useSecond ? second : first).focus();
}

function showHealth(health) {
  const pair = ([name, value]) => el("div", {}, el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, String(value)));
  byId("health").replaceChildren(...Object.entries(health).map(pair));
}

function showAlarms() {
  const alarms = state.reports.filter((report) => report.alarm).reverse();
  const item = (report) => el("li", {}, el("span", { class: "alarmed" }, `⚠ ${report.alarm}`),
    ` in batch ${report.number}, ${clock(report.time)}`);
  byId("alarms").replaceChildren(...alarms.map(item));
  byId("no-alarms").hidden = alarms.length > 0;
}

// ---- Reports, live or asked for ------------------------------------------------------------------------------------

/** Labels come without an event on the feed, and without a feed nothing does: then the reports are asked for. */
async function catchUp() {
  const stream = selected();
  if (!stream) return;
  const { loaded, live } = state;
  const same = loaded && loaded.labelled === stream.labelled && (live || loaded.batches === stream.batches);
  if (!same) await loadReports(stream.name);
}

async function loadReports(name) {
  const stream = selected();
  const { reports } = await ask(`${at(name)}/batches?last=${LAST}`);
  if (state.name !== name) return;
  const newest = reports.at(-1)?.time ?? -Infinity;
  const arrived = state.loaded ? state.reports.filter((report) => report.time > newest) : []; // on the feed, meanwhile
  state.reports = [...reports, ...arrived].slice(-LAST);
  state.loaded = stream;
  showReports();
}

function addReport(report) {
  const others = state.reports.filter((other) => other.number !== report.number);
  state.reports = [...others, report].slice(-LAST);
  showSoon();
}

function setLive(live) {
  state.live = live;
  showDetail();
}

async function follow() {
  const { name } = state;
  const { signal } = (state.feed = new AbortController());
  for (let wait = 1_000; !signal.aborted; wait = Math.min(2 * wait, 30_000)) {
    const began = Date.now();
    const error = await listen(name, signal).catch((cause) => cause);
    if (signal.aborted || error?.status === 404) return;
    setLive(false);
    if (error?.status === 401) return failed(error);
    if (Date.now() - began > 10_000) wait = 1_000; // it worked for a while: begin anew
    await new Promise((done) => setTimeout(done, Math.max(wait * (0.75 + Math.random() / 2), 1000 * (error?.wait ?? 0))));
  }
}

async function listen(name, signal) {
  const response = await request(`${at(name)}/reports`, { signal, headers: { Accept: "text/event-stream" } });
  setLive(true);
  await loadReports(name); // what was answered before the feed was open
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    await readEvents(reader, (event) => event.event === "report" && addReport(JSON.parse(event.data)));
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function readEvents(reader, heard) {
  let rest = "";
  for (;;) {
    const { value, done } = await soon(reader.read());
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    blocks.map(parseEvent).forEach(heard);
  }
}

function soon(promise) {
  let timer;
  const silence = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error("silence")), SILENCE)));
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
}

function parseEvent(block) {
  const fields = block.split("\n").map((line) => /^([^:]*):? ?(.*)$/.exec(line).slice(1));
  const all = (wanted) => fields.filter(([name]) => name === wanted).map(([, value]) => value);
  return { event: all("event").at(-1) ?? "message", data: all("data").join("\n") };
}

// ---- Charts --------------------------------------------------------------------------------------------------------

const viewName = (view) => (view === 0 ? "original" : `view ${view}`); // the operators of a view change every batch
const most = (values) => Math.max(0, ...values);
const viewsOf = (reports) => most(reports.map((report) => Math.max(report.reliability?.length ?? 0, report.views?.length ?? 0)));

/** Every chart: what to draw (a function of the width in px), its words, its legend and its table; or why it is empty. */
const CHARTS = {
  "chart-accuracy": ["Rolling accuracy", accuracyChart],
  "chart-reliability": ["Reliability of the views", reliabilityChart],
  "chart-suspicion": ["Suspicion", suspicionChart],
  "chart-dropped": ["Dropped views", droppedChart],
  "chart-classes": ["Classes answered", classesChart],
};

function accuracyChart(reports) {
  const labelled = reports.filter((report) => known(report.accuracy));
  if (!labelled.length) return { empty: "no labels posted" };
  const rolling = labelled.map((_, end) => meanAccuracy(labelled.slice(Math.max(0, end - ROLLING + 1), end + 1)));
  const numbers = labelled.map((report) => report.number);
  const lines = [
    { name: "each batch", kind: "faint", ys: labelled.map((report) => report.accuracy) },
    { name: `mean of ${ROLLING} labelled batches`, kind: "main", ys: rolling },
  ];
  return {
    words: `Accuracy over ${labelled.length} labelled batches; over the last ${ROLLING} of them ${percent(rolling.at(-1))}.`,
    draw: (width) => lineChart(width, { xs: numbers, lines, low: 0, high: 100, digits: 0, y: "accuracy, %" }),
    legend: lines.map(lineMark),
    head: ["batch", "accuracy, %", "rolling, %"],
    rows: labelled.map((report, place) => [report.number, fixed(report.accuracy, 1), fixed(rolling[place], 1)]),
  };
}

function meanAccuracy(reports) {
  return sum(reports.map((report) => report.accuracy * report.images)) / sum(reports.map((report) => report.images));
}

function reliabilityChart(reports) {
  const told = reports.filter((report) => report.reliability);
  if (!told.length) return { empty: reports.length ? "this predictor reports no reliability" : "no batches yet" };
  const xs = told.map((report) => report.number);
  const lines = range(viewsOf(told)).map((view) => ({
    name: viewName(view), kind: view ? `k${((view - 1) % 6) + 1}` : "main", ys: told.map((report) => report.reliability[view]),
  }));
  const low = Math.min(0, ...told.flatMap((report) => report.reliability).filter(known));
  const last = lines.map((line) => `${line.name} ${fixed(line.ys.at(-1), 2)}`);
  return {
    words: `Reliability of ${count(lines.length, "view")}, batches ${xs[0]} to ${xs.at(-1)}. Last batch: ${last.join(", ")}.`,
    draw: (width) => lineChart(width, { xs, lines: [...lines].reverse(), low: Math.floor(low * 4) / 4, high: 1, digits: 2, y: "reliability" }),
    legend: lines.map(lineMark),
    head: ["batch", ...lines.map((line) => line.name)],
    rows: told.map((report) => [report.number, ...lines.map((_, view) => fixed(report.reliability[view], 3))]),
  };
}

function suspicionChart(reports) {
  const told = reports.filter((report) => report.suspicion);
  if (!told.length) return { empty: reports.length ? "this predictor reports no suspicion" : "no batches yet" };
  const last = shares(told.at(-1).suspicion.histogram);
  const all = shares(range(10).map((bin) => sum(told.map((report) => report.suspicion.histogram[bin]))));
  const bin = (place) => `${(place / 10).toFixed(1)} to ${((place + 1) / 10).toFixed(1)}`;
  const mean = fixed(told.at(-1).suspicion.mean, 2);
  return {
    words: `Suspicion of the images. Last batch: mean ${mean}, most images (${percent(most(last), 0)}) ` +
      `between ${bin(last.indexOf(most(last)))}. Last ${told.length} batches: most between ${bin(all.indexOf(most(all)))}.`,
    draw: (width) => columnChart(width, last, all),
    legend: [blockMark("last batch", ""), blockMark(`mean of the last ${told.length}`, "hollow")],
    head: ["suspicion", "last batch", `last ${told.length}`],
    rows: last.map((share, place) => [bin(place), percent(share), percent(all[place])]),
  };
}

const shares = (counts) => counts.map((value) => (100 * value) / (sum(counts) || 1));

function droppedChart(reports) {
  const views = viewsOf(reports);
  if (!reports.length) return { empty: "no batches yet" };
  if (views < 2) return { empty: "one view only: none can be dropped" };
  const times = range(views).map((view) => reports.filter((report) => report.dropped === view).length);
  const bars = times.map((value, view) => ({ name: viewName(view), value: (100 * value) / reports.length }));
  const operators = reports.at(-1).views ?? [];
  return {
    words: `How often each view was dropped in ${reports.length} batches: ${inWords(bars)}.`,
    draw: (width) => barChart(width, bars, "dropped, % of batches"),
    head: ["view", "times", "share", "its operators in the last batch"],
    rows: bars.map((bar, view) => [bar.name, times[view], percent(bar.value), operators[view] ?? "–"]),
  };
}

function classesChart(reports) {
  const recent = reports.slice(-ROLLING).filter((report) => report.shares);
  if (!recent.length) return { empty: "no batches yet" };
  const images = sum(recent.map((report) => report.images)) || 1;
  const share = (label) => (100 * sum(recent.map((report) => (report.shares[label] ?? 0) * report.images))) / images;
  const all = range(recent[0].shares.length).map((label) => ({ name: className(label), value: share(label) }));
  const bars = largest(all);
  return {
    words: `Classes answered in the last ${recent.length} batches: ${inWords(bars)}.`,
    draw: (width) => barChart(width, bars, `% of images, last ${recent.length} batches`),
    head: ["class", "share of images"],
    rows: all.map((bar) => [bar.name, percent(bar.value)]),
  };
}

/** All bars in the model's order if they are few; else the largest, and the rest together. */
function largest(bars) {
  if (bars.length <= MOST_CLASSES) return bars;
  const sorted = [...bars].sort((one, other) => other.value - one.value);
  const rest = sorted.slice(MOST_CLASSES);
  return [...sorted.slice(0, MOST_CLASSES), { name: `${rest.length} others`, value: sum(rest.map((bar) => bar.value)) }];
}

const inWords = (bars) => bars.map((bar) => `${bar.name} ${percent(bar.value, 0)}`).join(", ");
const text = (x, y, words, anchor = "middle", more = {}) => svg("text", { x, y, "text-anchor": anchor, ...more }, words);
const rule = (x1, y1, x2, y2) => svg("line", { x1, y1, x2, y2, class: "grid" });

/** The frame of line and column charts: where y values lie, rules with their figures, and both axes' labels. */
function frame(width, { low, high, digits, x, y }) {
  const box = { left: 46, right: width - 10, top: 18, bottom: HEIGHT - 36 };
  const up = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  const parts = range(5).flatMap((step) => {
    const value = low + (step / 4) * (high - low);
    return [rule(box.left, up(value), box.right, up(value)), text(box.left - 6, up(value) + 4, value.toFixed(digits), "end")];
  });
  parts.push(text((box.left + box.right) / 2, HEIGHT - 4, x), text(4, 10, y, "start"));
  return { box, up, parts };
}

function lineChart(width, { xs, lines, ...axis }) {
  const { box, up, parts } = frame(width, { ...axis, x: "batch" });
  const span = xs.at(-1) - xs[0];
  const along = (x) => (span ? box.left + ((x - xs[0]) / span) * (box.right - box.left) : (box.left + box.right) / 2);
  const ticks = new Set([xs[0], xs[Math.floor(xs.length / 2)], xs.at(-1)]);
  for (const tick of ticks) parts.push(text(Math.min(along(tick), box.right - 8), box.bottom + 16, String(tick)));
  const path = (ys) => xs.map((x, place) => step(along(x), ys[place], ys[place - 1], up)).join("");
  for (const line of lines) parts.push(svg("path", { class: `line ${line.kind}`, d: path(line.ys) }));
  return parts;
}

/** A point after a gap starts a line of no length, which its round caps make a dot. */
function step(x, value, before, up) {
  if (!known(value)) return "";
  const point = `${x.toFixed(1)} ${up(value).toFixed(1)}`;
  return known(before) ? `L${point}` : `M${point}L${point}`;
}

function columnChart(width, last, all) {
  const high = Math.max(20, Math.ceil(most([...last, ...all]) / 20) * 20);
  const { box, up, parts } = frame(width, { low: 0, high, digits: 0, x: "suspicion", y: "images, %" });
  const wide = (box.right - box.left) / last.length;
  const column = (place, value, from, to, kind) => svg("rect", { class: `block ${kind}`, x: box.left + (place + from) * wide,
    y: up(value), width: (to - from) * wide, height: box.bottom - up(value) });
  last.forEach((value, place) => parts.push(column(place, value, 0.12, 0.48, ""), column(place, all[place], 0.52, 0.88, "hollow")));
  for (const edge of range(6)) parts.push(text(box.left + 2 * edge * wide, box.bottom + 16, (edge / 5).toFixed(1)));
  return parts;
}

function barChart(width, bars, label) {
  const left = Math.min(130, width * 0.35), right = width - 56, pitch = Math.max(18, Math.min(30, (HEIGHT - 30) / bars.length));
  const parts = [text((left + right) / 2, bars.length * pitch + 18, label)];
  bars.forEach((bar, place) => {
    const middle = (place + 0.5) * pitch, long = (Math.min(bar.value, 100) / 100) * (right - left);
    const name = text(left - 6, middle + 4, shortened(bar.name, Math.floor(left / 7.5)), "end");
    name.append(svg("title", {}, bar.name));
    parts.push(name, rule(left, middle, right, middle));
    parts.push(svg("rect", { class: "block", x: left, y: middle - pitch * 0.32, width: long, height: pitch * 0.64 }));
    parts.push(text(right + 6, middle + 4, percent(bar.value, 0), "start", { class: "value" }));
  });
  parts.height = bars.length * pitch + 24;
  return parts;
}

const shortened = (words, length) => (words.length > length ? `${words.slice(0, length - 1)}…` : words);

function lineMark({ name, kind }) {
  return el("li", {}, svg("svg", { "aria-hidden": "true" }, svg("path", { class: `line ${kind}`, d: "M2 6L26 6" })), name);
}

function blockMark(name, kind) {
  const block = svg("rect", { class: `block ${kind}`, x: 8, y: 1, width: 12, height: 10 });
  return el("li", {}, svg("svg", { "aria-hidden": "true" }, block), name);
}

function newChart(id, title) {
  const figure = byId("chart").content.firstElementChild.cloneNode(true);
  figure.id = id;
  figure.querySelector("h3").textContent = title;
  figure.querySelector(".scroll").setAttribute("aria-label", `${title}: data`);
  return figure;
}

function showChart(figure, title, { empty = "", words, draw, legend = [], head, rows }) {
  const part = (selector) => figure.querySelector(selector);
  setText(part(".empty"), empty);
  part(".empty").hidden = !empty;
  for (const selector of [".plot", ".legend", "details"]) part(selector).hidden = Boolean(empty);
  if (empty) return part(".plot").replaceChildren();
  const width = Math.max(240, part(".plot").clientWidth), parts = draw(width), height = parts.height ?? HEIGHT;
  const picture = { role: "img", "aria-label": `${title}. ${words}`, viewBox: `0 0 ${width} ${height}`, height };
  part(".plot").replaceChildren(svg("svg", picture, ...parts));
  part(".legend").replaceChildren(...legend);
  part("thead").replaceChildren(el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name))));
  fillTable(part("tbody"), rows);
}

function showReports() {
  for (const [id, [title, chart]] of Object.entries(CHARTS)) showChart(byId(id), title, chart(state.reports));
  showAlarms();
}

/** Many reports at once are drawn once. */
function showSoon() {
  if (showSoon.timer) return;
  showSoon.timer = setTimeout(() => {
    showSoon.timer = 0;
    showReports();
  }, 200);
}

// ---- What can be done ----------------------------------------------------------------------------------------------

const ACTIONS = {
  freeze: { done: "is frozen: it predicts and does not learn" },
  unfreeze: { done: "learns again" },
  reset: { sure: "goes back to the source model. What it has learnt is lost.", done: "is back at the source model" },
  rollback: { sure: "goes back to its last healthy state.", done: "is back at a healthy state" },
  delete: { sure: "is forgotten, with its state and its reports.", done: "is deleted" },
};

function confirmed(title, words) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = words;
  dialog.returnValue = ""; // Escape leaves it so
  dialog.showModal(); // the focus goes to Cancel, and back to the button when it closes
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

/** One thing at a time per button, and its failure in words. */
async function busy(button, work) {
  if (button.getAttribute("aria-busy") === "true") return;
  button.setAttribute("aria-busy", "true");
  await work().catch(failed);
  button.removeAttribute("aria-busy");
  if (!state.locked) await refresh();
}

async function act(what) {
  const { name } = state;
  const { sure, done } = ACTIONS[what];
  const title = byId(what).textContent;
  if (sure && !(await confirmed(`${title} ${name}?`, `Stream ${name} ${sure}`))) return;
  if (what === "delete") await ask(at(name), { method: "DELETE" });
  else await ask(`${at(name)}/${what}`, { method: "POST" });
  announce(`Stream ${name} ${done}.`);
  state.loaded = null; // its reports may be others now
  if (what !== "delete") return;
  deselect();
  byId("streams-title").focus(); // the button that had it is gone
}

async function create() {
  const name = byId("create-name").value.trim();
  const body = name ? { headers: { "Content-Type": "application/json" }, body: JSON.stringify({ name }) } : {};
  const stream = await ask("/v1/streams", { method: "POST", ...body });
  byId("create-name").value = "";
  state.streams = [...state.streams.filter((other) => other.name !== stream.name), stream];
  select(stream.name);
  announce(`Stream ${stream.name} is created.`);
}

const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

async function send() {
  const files = [...byId("files").files];
  if (!files.length) return announce("Choose one image or more first.", true);
  const { name } = state;
  const body = new FormData();
  for (const file of files) body.append("images", file);
  announce(`Sending ${count(files.length, "image")} to ${name}.`);
  const answer = await ask(`${at(name)}/batches`, { method: "POST", body, headers: { "Idempotency-Key": state.key } });
  state.key = newKey(); // sent once more on purpose, they are another batch
  if (state.name !== name) return;
  showAnswer(files, answer);
  const learnt = answer.adapted ? "learnt from" : "not learnt from";
  announce(`Batch ${answer.number}: ${count(files.length, "image")} answered, ${learnt}.`);
}

function showAnswer(files, { labels, probabilities, suspicion, abstain }) {
  const rows = files.map((file, place) => [file.name, className(labels[place]), percent(100 * most(probabilities[place])),
    fixed(suspicion?.[place], 3), abstain?.[place] ? "abstains" : "no"]);
  fillTable(byId("answers").querySelector("tbody"), rows, (place) => place === 2 || place === 3);
  byId("answers").hidden = false;
}

// ---- Start ---------------------------------------------------------------------------------------------------------

function onSubmit(form, button, work) {
  byId(form).addEventListener("submit", (event) => {
    event.preventDefault();
    busy(byId(button), work);
  });
}

function onArrow(event) {
  const move = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const button = move && event.target.closest("tr")?.[move]?.querySelector("button");
  if (!button) return;
  event.preventDefault();
  button.focus();
}

function onVisibility() {
  clearTimeout(state.timer);
  state.feed?.abort();
  if (document.hidden) return setLive(false);
  if (state.name !== null && !state.locked) follow();
  refresh();
}

function start() {
  byId("charts").append(...Object.entries(CHARTS).map(([id, [title]]) => newChart(id, title)));
  byId("streams").addEventListener("click", (event) => select(event.target.closest("tr").dataset.stream));
  byId("streams").addEventListener("keydown", onArrow);
  for (const what of Object.keys(ACTIONS)) byId(what).addEventListener("click", () => busy(byId(what), () => act(what)));
  byId("confirm-yes").addEventListener("click", () => byId("confirm").close("yes"));
  byId("confirm-no").addEventListener("click", () => byId("confirm").close(""));
  onSubmit("create-form", "create", create);
  onSubmit("send-form", "send", send);
  onSubmit("token-form", "token-save", async () => useToken(byId("token").value.trim()));
  byId("token-forget").addEventListener("click", () => useToken(""));
  byId("token-toggle").addEventListener("click", () => showToken(byId("token-form").hidden));
  byId("files").addEventListener("change", () => (state.key = newKey()));
  document.addEventListener("visibilitychange", onVisibility);
  window.addEventListener("resize", showSoon);
  refresh();
}

start();
