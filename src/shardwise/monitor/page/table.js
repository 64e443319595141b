// The text parts of the page: values, ranks, events, checkpoints. Rows are updated in place.

import { bytes, clock, count, number, rate, time } from "./format.js";

const PHASES = ["start", "data", "forward", "backward", "optimizer", "publish", "evaluate", "save", "end"];
const LATE_S = 1; // lag from which a rank counts as late; less is the jitter of a normal step

const element = (name, text = "", className = "") => Object.assign(document.createElement(name), { textContent: text, className });

/** The values above the charts. */
export function showTiles(section, status) {
  const test = Object.entries(status.evaluation).filter(([name]) => name !== "loss");
  const [testName, testValue] = test[0] ?? ["loss", status.evaluation.loss];
  const predicted = status.predicted_bytes == null ? status.prediction && `no prediction: ${status.prediction}`
    : `predicted ${bytes(status.predicted_bytes)} of tensors`;
  const whose = status.memory_rank == null ? "" : status.is_resident ? `resident, rank ${status.memory_rank}` : `rank ${status.memory_rank}`;
  const tiles = [
    status.num_steps != null && ["loss", number(status.loss), `step ${count(status.step)}`],
    testValue != null && [`test ${testName}`, testName === "accuracy" ? `${(testValue * 100).toFixed(2)} %` : number(testValue),
      status.evaluation.loss != null && testName !== "loss" ? `test loss ${number(status.evaluation.loss)}` : ""],
    status.samples_per_s != null && ["samples / s", rate(status.samples_per_s), status.lr == null ? "" : `learning rate ${number(status.lr)}`],
    (status.memory_bytes != null || status.predicted_bytes != null) && ["peak memory", bytes(status.memory_bytes), [whose, predicted].filter(Boolean).join(" · ")],
    status.ranks.length && ["ranks", count(status.ranks.length), states(status.ranks)],
    status.began_at != null && ["time", time(status.now - status.began_at), `since ${clock(status.began_at)} · ${count(status.restarts)} restart${status.restarts === 1 ? "" : "s"}`],
  ].filter(Boolean);
  while (section.children.length > tiles.length) section.lastChild.remove();
  tiles.forEach(([name, value, more], index) => {
    const tile = section.children[index] ?? section.appendChild(newTile());
    [tile.children[0].textContent, tile.children[1].textContent, tile.children[2].textContent] = [name, value, more];
  });
}

function newTile() {
  const tile = element("div", "", "tile");
  tile.append(element("span"), element("b"), element("small"));
  return tile;
}

function states(ranks) {
  const found = new Map();
  for (const { state } of ranks) found.set(state, (found.get(state) ?? 0) + 1);
  return [...found].map(([state, many]) => `${many} ${state}`).join(" · ");
}

const COLUMNS = [
  ["rank", "rank", "", (rank) => rank.rank],
  ["phase", "phase", "text", (rank) => PHASES.indexOf(rank.phase)],
  ["for", "for", "", (rank) => rank.since == null ? 0 : -rank.since],
  ["step", "step", "", (rank) => rank.step ?? -1],
  ["lag", "behind", "lag", (rank) => (rank.lag_steps ?? 0) * 1e6 + (rank.lag_s ?? -1)],
  ["memory", "memory", "", (rank) => rank.memory_bytes ?? -1],
  ["host", "host", "text wide", (rank) => rank.host],
  ["device", "device", "text wide", (rank) => rank.device],
  ["pid", "pid", "wide", (rank) => rank.pid ?? -1],
  ["state", "state", "text", (rank) => rank.state],
];

/** The table of ranks, one row per rank, sorted by any column; `onChoose` receives the rank that was clicked. */
export function ranksTable(table, strip, legend, onChoose) {
  const rows = new Map();
  let column = 0, direction = 1, latest = null, chosen = null;
  const head = table.tHead.insertRow();
  COLUMNS.forEach(([, title, className], index) => {
    const cell = element("th", "", className), button = element("button", title);
    cell.scope = "col";
    button.addEventListener("click", () => {
      direction = index === column ? -direction : index === 0 || index >= 6 ? 1 : -1;
      column = index;
      if (latest) show(...latest);
    });
    cell.append(button);
    head.append(cell);
  });
  const show = (status, choice) => {
    [latest, chosen] = [[status, choice], choice];
    const most = Math.max(1, ...status.ranks.map((rank) => rank.memory_bytes ?? 0), status.predicted_bytes ?? 0);
    [...head.cells].forEach((cell, index) => {
      if (index === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    const order = [...status.ranks].sort((a, b) => {
      const [left, right] = [COLUMNS[column][3](a), COLUMNS[column][3](b)];
      return (left < right ? -1 : left > right ? 1 : 0) * direction || a.rank - b.rank;
    });
    const known = new Set(order.map((rank) => rank.rank));
    for (const [number, row] of rows) if (!known.has(number)) { row.remove(); rows.delete(number); }
    order.forEach((rank, index) => {
      if (!rows.has(rank.rank)) rows.set(rank.rank, newRow(rank.rank, onChoose));
      const row = rows.get(rank.rank);
      fill(row, rank, status.now, most, rank.rank === chosen);
      if (table.tBodies[0].children[index] !== row) table.tBodies[0].insertBefore(row, table.tBodies[0].children[index] ?? null);
    });
    showStrip(strip, legend, status.ranks, onChoose);
  };
  return { show };
}

function newRow(rank, onChoose) {
  const row = element("tr");
  row.tabIndex = 0;
  row.dataset.rank = rank;
  for (const [name, , className] of COLUMNS) {
    const cell = element("td", "", className);
    if (name === "phase") cell.append(element("span", "", "chip"));
    if (name === "memory") {
      const meter = element("span", "", "meter");
      meter.append(element("i"));
      cell.append(element("span"), meter);
    }
    row.append(cell);
  }
  row.addEventListener("click", () => onChoose(rank));
  row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onChoose(rank); } });
  return row;
}

const isLate = (rank) => rank.state === "running" && ((rank.lag_s ?? 0) >= LATE_S);

function fill(row, rank, now, most, isChosen) {
  const [number, phase, since, step, lag, memory, host, device, pid, state] = row.cells;
  row.className = [isLate(rank) && "late", isChosen && "chosen"].filter(Boolean).join(" ");
  put(number, rank.rank);
  const chip = phase.firstChild;
  put(chip, rank.phase || "–");
  chip.style.setProperty("--phase", `var(--${rank.phase || "none"})`);
  put(since, rank.since == null || rank.state !== "running" ? "–" : time(Math.max(0, now - rank.since)));
  put(step, count(rank.step));
  put(lag, lagText(rank));
  put(memory.firstChild, bytes(rank.memory_bytes));
  memory.lastChild.hidden = rank.memory_bytes == null;
  memory.lastChild.firstChild.style.width = `${100 * (rank.memory_bytes ?? 0) / most}%`;
  put(host, rank.host || "–");
  put(device, rank.device || "–");
  put(pid, rank.pid ?? "–");
  put(state, rank.words && rank.state !== "done" ? `${rank.state}: ${rank.words}` : rank.state);
  state.className = `text state-${rank.state}`;
}

function lagText(rank) {
  if (rank.lag_s == null) return "–";
  if (!rank.lag_steps && rank.lag_s < 0.01) return "0";
  const steps = rank.lag_steps ? `, ${count(rank.lag_steps)} ${rank.lag_steps === 1 ? "step" : "steps"}` : "";
  return time(rank.lag_s) + steps;
}

function put(cell, text) {
  text = String(text);
  if (cell.textContent !== text) cell.textContent = text;
}

/** One small square per rank in the colour of its phase, so that a rank that differs is visible at once. */
function showStrip(strip, legend, ranks, onChoose) {
  while (strip.children.length > ranks.length) strip.lastChild.remove();
  strip.style.maxWidth = `${ranks.length * 48}px`;
  ranks.forEach((rank, index) => {
    let square = strip.children[index];
    if (!square) {
      square = strip.appendChild(element("i"));
      square.addEventListener("click", () => onChoose(Number(square.dataset.rank)));
    }
    square.dataset.rank = rank.rank;
    square.title = `rank ${rank.rank}: ${rank.phase || rank.state}${isLate(rank) ? `, ${lagText(rank)} behind` : ""}`;
    square.className = isLate(rank) ? "late" : rank.state === "failed" || rank.state === "gone" ? "failed" : "";
    square.style.background = square.className === "failed" ? "" : `var(--${rank.state === "done" ? "end" : rank.phase || "none"})`;
  });
  const phases = PHASES.filter((phase) => ranks.some((rank) => rank.phase === phase && rank.state !== "done"));
  const labels = phases.map((phase) => [phase, phase]);
  if (ranks.some((rank) => rank.state === "done")) labels.push(["end", "done"]);
  if (ranks.some((rank) => rank.state === "failed" || rank.state === "gone")) labels.push(["bad", "failed or gone"]);
  if (legend.dataset.shown === labels.join()) return;
  legend.dataset.shown = labels.join();
  legend.replaceChildren(...labels.map(([colour, label]) => {
    const span = element("span"), square = element("i");
    square.style.background = `var(--${colour})`;
    span.append(square, label);
    return span;
  }));
}

/** The history, newest entry first. */
export function showEntries(list, entries) {
  list.replaceChildren(...[...entries].sort((a, b) => b.at - a.at || b.number - a.number).map((entry) => {
    const row = element("li", "", entry.mood), at = element("time", clock(entry.at));
    at.dateTime = new Date(entry.at * 1000).toISOString();
    at.title = new Date(entry.at * 1000).toLocaleString("en-GB");
    row.append(at, element("i"), element("span", entry.rank == null ? entry.text : `rank ${entry.rank}: ${entry.text}`));
    return row;
  }));
}

/** Checkpoints, newest first, with their size on disk. */
export function showCheckpoints(table, checkpoints) {
  const body = element("tbody");
  for (const saved of checkpoints) {
    const row = body.insertRow();
    row.append(element("td", `step ${count(saved.step)}`), element("td", clock(saved.at)));
    row.append(element("td", saved.num_bytes == null ? "not on disk" : bytes(saved.num_bytes), saved.num_bytes == null ? "gone" : ""));
  }
  table.tBodies[0].replaceWith(body);
}
