// The service's dashboard: streams, their reports as charts, and what can be done to them. The API is docs/serve.md.
// Text from the server reaches the page only as text nodes and attributes, never as markup.

import { CHARTS, newChart, showChart } from "/dashboard/charts.js";
import { batches, byId, clock, count, el, fixed, known, most, percent, setPill, setRows, setText } from "/dashboard/words.js";

const REFRESH = 2_000; // ms between two looks at the streams
const LAST = 100; // batches the charts look back
const SILENCE = 40_000; // the feed sends something every 15 s; after this many ms it is considered broken
const AUDITED = 20; // events shown

const state = {
  token: sessionStorage.getItem("token") ?? "",
  locked: false, // a token is needed; nothing is requested until there is one
  model: null,
  streams: [],
  name: null, // the selected stream
  reports: [], // its last batches, oldest first
  loaded: null, // the stream as it was when its reports were last requested
  feed: null, // AbortController of the live feed
  live: false,
  troubled: false, // the last request of the stream list failed
  quietUntil: 0, // the server asked to wait until then
  turn: 0, // refreshes so far
  key: "", // Idempotency-Key of the chosen files: sent again after a lost answer, they are learnt from once
};
const timers = {};

function announce(words, bad = false) {
  byId("status").replaceChildren(el("p", bad ? { class: "bad" } : {}, words));
}

// ---- The API

/** A refusal by the server, in its own words. */
class Refusal extends Error {
  constructor(message, status, wait = 0) {
    super(message);
    Object.assign(this, { status, wait }); // wait: seconds
  }
}

const at = (name) => `/v1/streams/${encodeURIComponent(name)}`;

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const reason = body?.error ?? `The server answered ${response.status} without a reason.`;
  const wait = response.status === 429 ? Math.ceil(Number(response.headers.get("Retry-After"))) || 5 : 0;
  return new Refusal(String(reason), response.status, wait);
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
  if (error.status === 401) lock();
  if (error instanceof Refusal) return announce(error.message, true);
  console.error(error); // a bug in this page, or a server of another version
  announce("The dashboard cannot show what the server sent. The browser's console has details.", true);
}

// ---- Token

function showToken(shown) {
  byId("token-form").hidden = !shown;
  byId("token-toggle").setAttribute("aria-expanded", String(shown));
  if (shown) byId("token").focus();
}

function lock() {
  state.locked = true;
  state.feed?.abort();
  showToken(true);
}

async function useToken(token) {
  if (!/^[\x21-\x7e]*$/.test(token)) return announce("A token is printable ASCII without spaces.", true);
  sessionStorage.setItem("token", token);
  deselect();
  Object.assign(state, { token, locked: false, model: null, streams: [] });
  showStreams();
  showAudit([]);
  byId("token").value = "";
  showToken(false);
  byId("token-toggle").focus();
  announce(token ? "The token is used from now on." : "The token was forgotten.");
}

// ---- Refreshing

/** Refreshes now and, while the tab is visible, every two seconds. An overtaken result is ignored. */
async function refresh(thorough = false) {
  const turn = ++state.turn;
  const current = () => turn === state.turn;
  await look(current, thorough || turn % 5 === 1).catch((error) => current() && trouble(error));
  if (!current() || document.hidden) return;
  clearTimeout(timers.refresh);
  timers.refresh = setTimeout(refresh, Math.max(REFRESH, state.quietUntil - Date.now()));
}

async function look(current, thorough) {
  await lookIfReady();
  if (state.locked) return;
  if (!state.model || thorough) await loadModel();
  showRollout(state.model.rollout ? await ask("/v1/rollout") : null);
  const { streams } = await ask("/v1/streams");
  if (!current()) return;
  state.streams = streams;
  showStreams();
  if (thorough) showAudit((await ask("/v1/audit")).events.slice(0, AUDITED));
  await catchUp();
  if (state.troubled) announce("The server answers again.");
  state.troubled = false;
}

async function lookIfReady() {
  const word = await request("/readyz").then(() => "ready", (error) => (error.status ? "not ready" : "unreachable"));
  setPill("server", word, word === "ready");
}

/** Reports a failure once, also if every refresh fails. */
function trouble(error) {
  state.quietUntil = Date.now() + 1000 * (error.wait ?? 0);
  state.model = null; // it may be another one after a restart
  if (!state.troubled) failed(error);
  state.troubled = error.status !== 401; // a new token ends that one
}

async function loadModel() {
  state.model = await ask("/v1/model");
  const { method, norm, predictor } = state.model;
  setText(byId("model-method"), norm ? `${method}, ${norm}` : String(method));
  setText(byId("model-predictor"), String(predictor));
  setText(byId("model-version"), String(state.model.version).slice(0, 8));
  byId("model-version").title = state.model.version;
}

const className = (label) => String(state.model?.classes?.[label] ?? label);

/** How the shadow compares with the live model. */
function showRollout(found) {
  byId("rollout").hidden = !found;
  if (!found) return;
  const row = (name, show) => [name, show("live"), show("shadow")];
  const share = (value) => percent(known(value) ? 100 * value : null);
  setRows(byId("rollout-rows"), [
    row("file", (who) => found[who].model || "–"),
    row("version", (who) => found[who].version),
    row("flagged", (who) => share(found.flagged[who])),
    row("accuracy", (who) => percent(found.accuracy[who])),
    row("seconds per batch", (who) => fixed(found.seconds[who], 3)),
  ], [1, 2]);
  const { counts } = found;
  setText(byId("rollout-facts"), [`${share(found.agreement)} of ${count(counts.images, "image")} got the same class`,
    `${counts.labelled} labelled`, `${batches(counts.missed)} missed`, `${batches(counts.failed)} failed`].join(" · "));
}

function showAudit(events) {
  byId("no-audit").hidden = events.length > 0;
  const row = (event) => [clock(event.time), event.owner || "–", event.stream || "–", event.what];
  setRows(byId("audit"), events.map(row));
}

// ---- Streams

const selected = () => state.streams.find((stream) => stream.name === state.name);

const KINDS = { attack: "attack suspected", abstentions: "most answers flagged" };
const COLUMNS = ["", "number", "number", "number", "number", "number", "", "", ""]; // of the table, after the name

/** What is wrong now; and what the guard had to do since the stream was created. */
function alarmsOf({ alarms = [], health = {} }) {
  const events = [[health.collapses, "collapse"], [health.rollbacks, "rollback"]].filter(([number]) => number > 0);
  return { active: alarms.map(({ kind }) => KINDS[kind] ?? kind), events: events.map((event) => count(...event)) };
}

const suspiciousNow = ({ suspicious: share }) => percent(known(share) ? 100 * share : null, share > 0 && share < 0.1 ? 1 : 0);

const placeOf = ({ state: place }) => ({ hot: "in memory", parked: "on disk" })[place] ?? String(place);

function newRow(name) {
  const row = el("tr", { "data-stream": name }, el("th", { scope: "row" }, el("button", { type: "button" }, name)));
  for (const kind of COLUMNS) row.append(el("td", { class: kind }));
  return row;
}

function fillRow(row, stream) {
  const { active, events } = alarmsOf(stream), found = [...active, ...events].join(", ");
  const texts = [found ? `⚠ ${found}` : stream.batches ? "none" : "–", suspiciousNow(stream), String(stream.abstained), String(stream.batches),
    String(stream.images), percent(stream.accuracy), placeOf(stream), stream.frozen ? "yes" : "no", stream.owner || "–"];
  texts.forEach((text, place) => setText(row.cells[place + 1], text));
  row.cells[1].className = found ? "alarmed" : "";
  row.cells[2].className = active.includes(KINDS.attack) ? "number alarmed" : "number";
  row.setAttribute("aria-selected", String(stream.name === state.name));
}

/** Keeps and moves rows instead of making new ones, so that the focus stays in its row. */
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
  const alarmed = state.streams.filter((stream) => stream.alarms.length).length;
  document.title = `${alarmed ? `⚠ ${alarmed} · ` : ""}safer-tta: streams`;
  if (!selected()) deselect();
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
  Object.assign(state, { name: null, reports: [], loaded: null, live: false });
}

function showDetail() {
  const stream = selected();
  byId("detail").hidden = !stream;
  byId("no-selection").hidden = Boolean(stream) || state.streams.length === 0;
  if (!stream) return;
  setText(byId("detail-title"), `Stream ${stream.name}`);
  showStanding(stream);
  setText(byId("detail-facts"), factsOf(stream));
  setPill("feed", state.live ? "live" : "not live: refreshed every 2 s", state.live);
  swap(byId("freeze"), byId("unfreeze"), stream.frozen);
  const words = (name) => name.replace("non_finite", "non-finite").replaceAll("_", " ");
  const counter = ([name, value]) => el("div", {}, el("dt", {}, words(name)), el("dd", {}, String(value)));
  byId("health").replaceChildren(...Object.entries(stream.health ?? {}).map(counter));
}

/** The active alarms in words. That there are none is only said of a stream that has answered something. */
function showStanding({ alarms, batches: answered, suspicious }) {
  const words = alarms.map((alarm) => `⚠ ${alarm.words}. Since ${clock(alarm.since)}, batch ${alarm.batch}.`);
  const unknown = known(suspicious) ? "" : " Attacks would not be noticed: this predictor does not estimate suspicion.";
  const calm = answered ? `✓ No alarm is active.${unknown}` : "Nothing has been answered yet.";
  const kind = words.length ? "bad" : answered && !unknown ? "good" : "soft";
  const shown = words.length ? words : [calm];
  const before = [...byId("standing").children].map((line) => line.textContent);
  if (before.join() === shown.join()) return; // a screen reader does not start again
  byId("standing").replaceChildren(...shown.map((text) => el("p", { class: kind }, text)));
}

function factsOf(stream) {
  const { labelled } = stream;
  const accuracy = labelled ? `accuracy ${percent(stream.accuracy)} of ${labelled} labelled` : "no labels";
  return [batches(stream.batches), count(stream.images, "image"), `${stream.abstained} flagged`, accuracy,
    stream.frozen ? "frozen: predicts only" : "learning", placeOf(stream),
    `created ${clock(stream.created)}`].join(" · ");
}

/** Shows one of two buttons; the focus moves with it. */
function swap(first, second, useSecond) {
  const focused = [first, second].includes(document.activeElement);
  first.hidden = useSecond;
  second.hidden = !useSecond;
  if (focused) (useSecond ? second : first).focus();
}

function showAlarms() {
  const alarms = state.reports.filter((report) => report.alarm).reverse();
  setRows(byId("alarms"), alarms.map((report) => [`⚠ ${report.alarm}`, `batch ${report.number}`, clock(report.time)]));
  byId("no-alarms").hidden = alarms.length > 0;
}

// ---- Reports, from the feed or requested

/** Requests the reports if there is no feed, or if labels came, which the feed does not report. */
async function catchUp() {
  const stream = selected();
  if (!stream) return;
  const { loaded, live } = state;
  const same = loaded && loaded.labelled === stream.labelled && (live || loaded.batches === stream.batches);
  if (!same) await loadReports(stream.name);
}

async function loadReports(name) {
  const stream = selected();
  const before = new Set(state.reports);
  const { reports } = await ask(`${at(name)}/batches?last=${LAST}`);
  if (state.name !== name) return;
  const listed = new Set(reports.map((report) => report.number));
  const fromFeed = state.reports.filter((report) => !before.has(report) && !listed.has(report.number)); // meanwhile
  state.reports = [...reports, ...fromFeed].slice(-LAST);
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

/** Keeps a feed of the selected stream open. If it breaks, tries again after longer and longer pauses. */
async function follow() {
  const { name } = state;
  const { signal } = (state.feed = new AbortController());
  for (let wait = 1_000; !signal.aborted; wait = Math.min(2 * wait, 30_000)) {
    const began = Date.now();
    const error = await listen(name, signal).catch((cause) => cause);
    if (signal.aborted) return;
    setLive(false);
    if (error?.status === 401) return failed(error);
    if (Date.now() - began > 10_000) wait = 1_000; // it worked for a while: short pauses again
    await new Promise((done) => setTimeout(done, wait * (0.75 + Math.random() / 2) + 1000 * (error?.wait ?? 0)));
  }
}

async function listen(name, signal) {
  const response = await request(`${at(name)}/reports`, { signal, headers: { Accept: "text/event-stream" } });
  setLive(true);
  await loadReports(name); // what was answered before the feed was open
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    await readEvents(reader, (event, data) => event === "report" && state.name === name && addReport(JSON.parse(data)));
  } finally {
    reader.cancel().catch(() => {}); // broken already, perhaps
  }
}

async function readEvents(reader, heard) {
  for (let rest = ""; ; ) {
    const { value, done } = await soon(reader.read());
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) heard(field(block, "event"), field(block, "data"));
  }
}

function field(block, name) {
  const lines = block.split("\n").filter((line) => line.startsWith(`${name}:`));
  return lines.map((line) => line.slice(name.length + 1).replace(/^ /, "")).join("\n");
}

function soon(promise) {
  let timer;
  const silence = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error("silence")), SILENCE)));
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
}

function showReports() {
  for (const [id, [title, chart]] of Object.entries(CHARTS)) showChart(byId(id), title, chart(state.reports, className, state.model));
  showAlarms();
}

/** Many reports at once are drawn once. */
function showSoon() {
  clearTimeout(timers.show);
  timers.show = setTimeout(showReports, 100);
}

// ---- What can be done

const ACTIONS = {
  freeze: { done: "is frozen: it predicts and does not learn" },
  unfreeze: { done: "learns again" },
  reset: { sure: "returns to the source model. What it has learnt is lost.", done: "has returned to the source model" },
  rollback: { sure: "returns to its last healthy state.", done: "has returned to a healthy state" },
  delete: { sure: "is deleted with its state and its reports.", done: "was deleted" },
};

function confirmed(verb, name, sure) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = `${verb} ${name}?`;
  byId("confirm-text").textContent = `Stream ${name} ${sure}`;
  byId("confirm-yes").textContent = verb;
  dialog.returnValue = ""; // Escape does not change it
  dialog.showModal(); // the focus goes to Cancel, and back to the button when it closes
  return new Promise((done) => (dialog.onclose = () => done(dialog.returnValue === "yes")));
}

/** Does one thing at a time per button, and reports its failure. */
async function busy(button, work) {
  if (button.getAttribute("aria-busy") === "true") return;
  button.setAttribute("aria-busy", "true");
  await work().catch(failed);
  button.removeAttribute("aria-busy");
  await refresh(true);
}

async function act(what) {
  const { name } = state;
  const { sure, done } = ACTIONS[what];
  if (sure && !(await confirmed(byId(what).textContent, name, sure))) return;
  if (what === "delete") await ask(at(name), { method: "DELETE" });
  else await ask(`${at(name)}/${what}`, { method: "POST" });
  announce(`Stream ${name} ${done}.`);
  state.loaded = null; // its reports may have changed
  if (what === "delete") byId("streams-title").focus(); // the button that had the focus disappears
}

async function create() {
  const name = byId("create-name").value.trim();
  const body = name ? { headers: { "Content-Type": "application/json" }, body: JSON.stringify({ name }) } : {};
  const stream = await ask("/v1/streams", { method: "POST", ...body });
  byId("create-name").value = "";
  state.streams = [...state.streams, stream];
  select(stream.name);
  announce(`Stream ${stream.name} was created.`);
}

const newKey = () => [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16)).join("-");

async function send() {
  const files = [...byId("files").files];
  if (!files.length) return announce("Choose at least one image first.", true);
  const { name } = state;
  const body = new FormData();
  for (const file of files) body.append("images", file);
  announce(`Sending ${count(files.length, "image")} to ${name}.`);
  const answer = await ask(`${at(name)}/batches`, { method: "POST", body, headers: { "Idempotency-Key": state.key } });
  state.key = newKey(); // if they are sent again on purpose, they are another batch
  if (state.name === name) showAnswer(files, answer);
  const learnt = answer.adapted ? "learnt from" : "not learnt from";
  announce(`Batch ${answer.number} of ${name}: ${count(files.length, "image")} answered, ${learnt}.`);
}

function showAnswer(files, { labels, probabilities, suspicion, abstain }) {
  const top = (place) => percent(100 * most(probabilities[place]));
  const rows = files.map((file, place) => [file.name, className(labels[place]), top(place),
    fixed(suspicion?.[place], 3), abstain?.[place] ? "yes" : "no"]);
  setRows(byId("answers").querySelector("tbody"), rows, [2, 3]);
  byId("answers").hidden = false;
}

// ---- Start

function onSubmit(form, button, work) {
  byId(form).addEventListener("submit", (event) => {
    event.preventDefault();
    busy(byId(button), work);
  });
}

function onArrow(event) {
  const way = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const button = way && event.target.closest("tr")[way]?.querySelector("button");
  if (!button) return;
  event.preventDefault();
  button.focus();
}

/** A hidden tab sends no requests and holds no connection. */
function onVisibility() {
  clearTimeout(timers.refresh);
  state.feed?.abort();
  setLive(false);
  if (document.hidden) return;
  if (selected() && !state.locked) follow();
  refresh();
}

function start() {
  const on = (id, event, work) => byId(id).addEventListener(event, work);
  byId("charts").append(...Object.entries(CHARTS).map(newChart));
  on("streams", "click", (event) => select(event.target.closest("tr").dataset.stream));
  on("streams", "keydown", onArrow);
  for (const what of Object.keys(ACTIONS)) on(what, "click", () => busy(byId(what), () => act(what)));
  on("confirm-yes", "click", () => byId("confirm").close("yes"));
  on("confirm-no", "click", () => byId("confirm").close(""));
  onSubmit("create-form", "create", create);
  onSubmit("send-form", "send", send);
  onSubmit("token-form", "token-save", () => useToken(byId("token").value.trim()));
  on("token-forget", "click", () => busy(byId("token-forget"), () => useToken("")));
  on("token-toggle", "click", () => showToken(byId("token-form").hidden));
  on("files", "change", () => (state.key = newKey()));
  document.addEventListener("visibilitychange", onVisibility);
  window.addEventListener("resize", showSoon);
  refresh();
}

start();
