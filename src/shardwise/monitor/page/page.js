// The page of a run: requests an increment of the state about once a second and draws it.

import { chart, key } from "./chart.js";
import { ranksTable, showCheckpoints, showEntries, showTiles } from "./table.js";
import { byteUnit, bytes, count, number, parameters, rate, time } from "./format.js";

const POLL_MS = 1000, REST_MS = 4000, FIRST_MS = 100, MOST_ENTRIES = 500;
const $ = (id) => document.getElementById(id);

let cursor = "", entries = [], curves = {}, status = null, chosen = null, stream = "out", failures = 0;

const hover = (step, event) => {
  for (const each of Object.values(charts)) each.hover(step);
  showTip(step, event);
};
const options = { onHover: hover };
const charts = {
  loss: chart($("charts"), { name: "loss", title: "Loss", format: number, fromZero: false, canLog: true, ...options }),
  throughput: chart($("charts"), { name: "throughput", title: "Samples per second", format: rate, ...options }),
  memory: chart($("charts"), { name: "memory", title: "Memory of rank 0", format: bytes, unit: byteUnit, ...options }),
  gradient: chart($("charts"), { name: "gradient", title: "Gradient norm", format: number, ...options }),
  learning_rate: chart($("charts"), { name: "throughput", title: "Learning rate", format: number, ...options }),
};
const ranks = ranksTable($("ranks"), $("strip"), $("legend"), choose);

async function poll() {
  let wait = POLL_MS;
  try {
    const response = await fetch(`state?since=${encodeURIComponent(cursor)}`, { cache: "no-store" });
    if (!response.ok) throw new Error(response.status === 403 ? "the token of this address is no longer valid" : `the server returned status ${response.status}`);
    apply(await response.json());
    failures = 0;
    $("lost").hidden = true;
    if (status.reading < 1) wait = FIRST_MS;
    else if (status.state !== "running" || document.hidden) wait = REST_MS;
  } catch (error) {
    failures += 1;
    wait = Math.min(REST_MS, POLL_MS * failures / 2);
    $("lost").textContent = error instanceof TypeError ? "The watch server does not respond; the page continues when the server is back." : `No update: ${error.message}.`;
    $("lost").hidden = false;
  }
  setTimeout(poll, wait);
}

function apply(increment) {
  cursor = increment.cursor;
  status = increment.status;
  if (increment.whole) [entries, curves] = [[], {}];
  for (const [name, { start, width, rows }] of Object.entries(increment.curves)) {
    const curve = curves[name] ??= { rows: [] };
    curve.width = width;
    curve.rows.length = start;
    for (const row of rows) curve.rows.push(row);
  }
  if (increment.whole || increment.entries.length) {
    entries = [...entries, ...increment.entries].slice(-MOST_ENTRIES);
    showEntries($("entries"), entries);
  }
  showHeader();
  showTiles($("tiles"), status);
  showCharts();
  showRanks();
  showCheckpoints($("checkpoints"), status.checkpoints);
  $("checkpoints-card").hidden = !status.checkpoints.length;
  document.body.dataset.ready = "yes";
}

function showHeader() {
  const { step, num_steps: all } = status, share = all ? Math.min(1, step / all) : 0;
  document.title = `${all ? `${Math.floor(share * 100)} % · ` : ""}${status.state} · ${status.name}`;
  $("name").textContent = status.name;
  $("state").textContent = status.state;
  $("state").className = `pill ${status.state}`;
  $("facts").textContent = [status.job, status.plan, parameters(status.parameters), status.path].filter(Boolean).join(" · ");
  $("bar").style.width = `${share * 100}%`;
  $("bar").parentElement.hidden = !all;
  $("step").textContent = all ? `step ${count(step)} of ${count(all)}${status.epoch == null ? "" : `, epoch ${status.epoch + 1}`}` : "";
  $("eta").textContent = status.reading < 1 ? `reading the events: ${Math.floor(status.reading * 100)} %`
    : status.eta_s == null ? "" : `${time(status.eta_s)} left`;
  $("verdict").textContent = status.verdict;
  $("verdict").hidden = !status.verdict;
}

function showCharts() {
  const dots = curves.evaluation?.rows ?? [];
  const begin = Math.min(curves.loss?.rows[0]?.[0] ?? 0, dots[0]?.[0] ?? Infinity);
  const marks = { restarts: status.restart_marks, begin, end: curves.loss?.rows.length ? Math.max(1, status.step) : 1 };
  const none = { rows: [], width: 1 };
  charts.loss.show({
    ...none, ...curves.loss, ...marks, dots, saves: status.checkpoints,
    keys: [dots.length && key("evaluation", "test loss"), status.checkpoints.length && "▲ checkpoint"].filter(Boolean),
  });
  charts.throughput.show({ ...none, ...curves.throughput, ...marks });
  const line = status.is_resident ? null : status.predicted_bytes;
  charts.memory.show({ ...none, ...curves.memory, ...marks, line, keys: line == null ? [] : [key("quiet", `predicted ${bytes(line)}`, true)] });
  charts.gradient.show({ ...none, ...curves.gradient, ...marks });
  charts.learning_rate.show({ ...none, ...curves.learning_rate, ...marks });
  for (const name of Object.keys(curves).filter((each) => each.includes("/"))) {
    charts[name] ??= chart($("charts"), { name: "evaluation", title: curveTitle(name), format: number, fromZero: false, ...options });
    charts[name].show({ ...none, ...curves[name], ...marks });
  }
  const visible = Object.values(charts).map(({ card }) => card).filter((card) => !card.hidden);
  visible.forEach((card, index) => card.classList.toggle("alone", visible.length % 2 === 1 && index === visible.length - 1));
  $("charts").hidden = !Object.values(curves).some((curve) => curve.rows.length);
}

/** The title of a user-defined curve: evaluation/NAME is a metric of the test split, log/NAME a logged value. */
function curveTitle(name) {
  const [kind, ...rest] = name.split("/");
  return kind === "evaluation" ? `Test ${rest.join("/")}` : rest.join("/");
}

function showRanks() {
  $("ranks-card").hidden = !status.ranks.length;
  const running = status.ranks.filter((rank) => rank.lag_s != null);
  const last = running.reduce((worst, rank) => rank.lag_s > (worst?.lag_s ?? 0) ? rank : worst, null);
  $("ranks-note").textContent = last && last.lag_s >= 1 ? `rank ${last.rank} is last: ${time(last.lag_s)} behind` : "click a rank for its log";
  ranks.show(status, chosen);
  if (chosen === null && $("charts").hidden && status.ranks.length) choose(status.ranks[0].rank, false);
}

function choose(rank, scroll = true) {
  chosen = rank;
  ranks.show(status, chosen);
  stream = "error";
  showLog().then(() => { if (scroll) $("log-card").scrollIntoView({ behavior: "smooth", block: "nearest" }); });
}

async function showLog() {
  if (chosen === null) return;
  const rank = chosen;
  let logs;
  try {
    logs = await (await fetch(`log?rank=${rank}`, { cache: "no-store" })).json();
  } catch { return; }
  if (rank !== chosen) return;
  const names = { error: "traceback", out: "stdout", err: "stderr" };
  const available = Object.keys(names).filter((name) => name !== "error" || logs.error);
  if (!available.includes(stream)) stream = "out";
  $("log-card").hidden = false;
  $("log-rank").textContent = rank;
  $("log-tabs").replaceChildren(...available.map((name) => {
    const button = Object.assign(document.createElement("button"), { textContent: names[name] });
    button.setAttribute("aria-pressed", name === stream);
    button.addEventListener("click", () => { stream = name; showLog(); });
    return button;
  }));
  const log = $("log"), isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
  const text = logs[stream] || "(empty)";
  if (log.textContent !== text) {
    log.textContent = text;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}

function showTip(step, event) {
  const tip = $("tip");
  if (step === null || !event) { tip.hidden = true; return; }
  const values = Object.values(charts).map((each) => each.valueAt(step)).filter(Boolean);
  const loss = values[0];
  if (!loss) return;
  const first = loss.row[0], last = Math.min(first + loss.width - 1, Math.max(first, status.step));
  const range = first === last ? `step ${count(first)}` : `steps ${count(Math.max(1, first))} – ${count(last)}`;
  const rows = [Object.assign(document.createElement("b"), { textContent: range })];
  const line = (name, value) => {
    const row = document.createElement("div"), em = Object.assign(document.createElement("em"), { textContent: value });
    row.append(name, em);
    rows.push(row);
  };
  for (const { title, row, format, dot } of values) {
    line(title, row[3] === null ? "not finite" : format(row[3]));
    if (title === "Loss" && row[2] > row[1]) line("minimum to maximum", `${format(row[1])} – ${format(row[2])}`);
    if (dot) line(`test loss, step ${count(dot[0])}`, format(dot[3]));
  }
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 8))}px`;
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) showLog(); });
setInterval(() => { if (!document.hidden && !$("log-card").hidden) showLog(); }, 2000);
poll();
