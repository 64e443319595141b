// Curves on a canvas: a band from the minimum to the maximum of each range of steps, and a line through the means.

const LEFT = 58, RIGHT = 14, TOP = 20, BOTTOM = 24, COLUMN = 2, FONT = "12px system-ui, sans-serif";
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Create a chart in `section`; `show` receives the data, `onHover` the step under the pointer, or null without one. */
export function chart(section, { name, title, format, unit = () => 1, fromZero = true, canLog = false, onHover }) {
  const card = document.createElement("figure");
  card.className = "card chart";
  card.style.margin = "0";
  const heading = document.createElement("h2");
  const label = Object.assign(document.createElement("span"), { textContent: title });
  const keys = document.createElement("span");
  keys.className = "key";
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  heading.append(label, keys);
  let isLog = false, data = null, hovered = null, isDue = false;
  if (canLog) heading.append(logSwitch((on) => { isLog = on; draw(); }));
  card.append(heading, canvas);
  section.append(card);

  const draw = () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; if (data) paint(); });
  };
  const paint = () => {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    if (!box.width) return;
    const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, box.width, box.height);
    const scale = scales(data, box, fromZero, isLog);
    axes(pen, scale, box, format, unit);
    marks(pen, scale, box, data);
    band(pen, scale, columns(data.rows, scale), style(name));
    if (data.dots?.length) dots(pen, scale, data.dots);
    if (hovered !== null) crosshair(pen, scale, box, nearest(data.rows, hovered, data.width), style(name));
  };
  const stepAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const scale = scales(data, box, fromZero, isLog);
    return scale.step(event.clientX - box.left);
  };
  canvas.addEventListener("pointermove", (event) => { if (data?.rows.length) onHover(stepAt(event), event, api); });
  canvas.addEventListener("pointerleave", () => onHover(null));
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const api = {
    card,
    show(shown) {
      data = shown;
      card.hidden = !shown.rows.length;
      const last = shown.rows.length ? format(shown.rows.at(-1)[3]) : "no data", restarts = shown.restarts?.length ?? 0;
      canvas.setAttribute("aria-label", `${title}: ${last}${restarts ? `, restarted ${restarts} times` : ""}`);
      keys.replaceChildren(...(shown.keys ?? []));
      draw();
    },
    hover(step) { if (hovered !== step) { hovered = step; draw(); } },
    valueAt(step) {
      const row = data?.rows.length ? nearest(data.rows, step, data.width) : null;
      return row && { title, row, format, width: data.width, dot: data.dots?.length ? nearest(data.dots, step, data.width) : null };
    },
  };
  return api;
}

/** A legend entry of a chart: a ring or a dash in a colour, and its label. */
export function key(colour, label, dash = false) {
  const span = document.createElement("span"), ring = document.createElement("i");
  span.className = "key";
  ring.className = dash ? "dash" : "";
  ring.style.borderColor = `var(--${colour})`;
  span.append(ring, label);
  return span;
}

function logSwitch(onChange) {
  const label = document.createElement("label"), box = document.createElement("input");
  box.type = "checkbox";
  box.id = "log-scale";
  box.addEventListener("change", () => onChange(box.checked));
  label.append(box, "log scale");
  return label;
}

function nearest(rows, step, width) {
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] + width / 2 < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - rows[low - 1][0] < rows[low][0] - step ? rows[low - 1] : rows[low];
}

function scales({ rows, width, begin, end, line, dots }, box, fromZero, isLog) {
  let low = Infinity, high = -Infinity;
  for (const [, rowLow, rowHigh] of [...rows, ...(dots ?? [])]) {
    if (rowLow === null) continue;
    if (isLog && rowLow <= 0) continue;
    low = Math.min(low, rowLow);
    high = Math.max(high, rowHigh);
  }
  if (line != null) { low = Math.min(low, line); high = Math.max(high, line); }
  if (!(low <= high)) [low, high] = isLog ? [0.1, 1] : [0, 1];
  if (fromZero && !isLog) low = Math.min(0, low);
  if (low === high) high = low + Math.abs(low || 1) * 0.1;
  const margin = isLog ? 0 : (high - low) * 0.06;
  [low, high] = [fromZero && low === 0 ? 0 : low - margin, high + margin];
  const first = Math.min(begin ?? Infinity, rows.length ? rows[0][0] : 0), last = Math.max(end ?? (rows.length ? rows.at(-1)[0] + width - 1 : 1), first + 1);
  const across = box.width - LEFT - RIGHT, down = box.height - TOP - BOTTOM;
  const up = isLog ? Math.log : (value) => value;
  return {
    low, high, first, last, isLog,
    x: (step) => LEFT + (step - first) / (last - first) * across,
    y: (value) => TOP + down - (up(Math.max(value, isLog ? low : -Infinity)) - up(low)) / (up(high) - up(low)) * down,
    step: (x) => first + (x - LEFT) / across * (last - first),
  };
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power, found = [];
  for (let at = Math.ceil(low / unit) * unit; at <= high + unit * 1e-9; at += unit) found.push(Math.abs(at) < unit * 1e-9 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of [1, 2, 5]) {
      const at = factor * 10 ** power;
      if (at >= low * 0.999 && at <= high * 1.001) found.push(at);
    }
  return found.length >= 2 ? found : ticks(low, high, 4).filter((at) => at > 0);
}

function axes(pen, scale, box, format, unit) {
  pen.font = FONT;
  pen.lineWidth = 1;
  pen.strokeStyle = style("grid");
  pen.fillStyle = style("quiet");
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const size = unit(scale.high); // the unit of format(): ticks are at round multiples of it
  const values = scale.isLog ? logTicks(scale.low, scale.high) : ticks(scale.low / size, scale.high / size, 4).map((at) => at * size);
  for (const value of values) {
    const y = Math.round(scale.y(value)) + 0.5;
    pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(box.width - RIGHT, y); pen.stroke();
    pen.fillText(format(value), LEFT - 8, y);
  }
  pen.textBaseline = "top";
  pen.textAlign = "center";
  const count = Math.max(2, Math.floor(box.width / 100));
  for (const step of ticks(scale.first, scale.last, count)) {
    if (!Number.isInteger(step)) continue;
    const label = step.toLocaleString("en"), half = pen.measureText(label).width / 2;
    pen.fillText(label, Math.min(scale.x(step), box.width - half - 2), box.height - BOTTOM + 8);
  }
}

/** Merge rows in the same column of pixels into one row with their minimum, maximum and mean. */
function columns(rows, scale) {
  const found = [];
  let column = null, place = null, weight = 0;
  for (const row of rows) {
    const at = Math.floor(scale.x(row[0]) / COLUMN);
    if (column && at === place && column[1] !== null && row[1] !== null) {
      weight += 1;
      column[1] = Math.min(column[1], row[1]);
      column[2] = Math.max(column[2], row[2]);
      column[3] += (row[3] - column[3]) / weight;
    } else {
      [column, place, weight] = [[...row], at, 1];
      found.push(column);
    }
  }
  return found;
}

function band(pen, scale, rows, colour) {
  const points = [];
  for (const row of rows) points.push(row[1] === null || (scale.isLog && row[1] <= 0) ? null : row);
  pen.fillStyle = colour;
  pen.strokeStyle = colour;
  pen.lineJoin = "round";
  for (let start = 0; start < points.length;) {
    if (!points[start]) { start++; continue; }
    let stop = start;
    while (stop < points.length && points[stop]) stop++;
    const run = points.slice(start, stop);
    pen.globalAlpha = 0.2;
    pen.beginPath();
    for (const row of run) pen.lineTo(scale.x(row[0]), scale.y(row[2]));
    for (const row of run.reverse()) pen.lineTo(scale.x(row[0]), scale.y(row[1]));
    pen.fill();
    pen.globalAlpha = 0.5;
    pen.lineWidth = 1;
    const wide = (scale.high - scale.low) * 0.1;
    for (const row of run) if (row[2] - row[1] > wide) { // the band of a spike of one step is thinner than a pixel
      pen.beginPath(); pen.moveTo(scale.x(row[0]), scale.y(row[1])); pen.lineTo(scale.x(row[0]), scale.y(row[2])); pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1.7;
    pen.beginPath();
    for (const row of run) pen.lineTo(scale.x(row[0]), scale.y(row[3]));
    pen.stroke();
    if (run.length === 1) { pen.beginPath(); pen.arc(scale.x(run[0][0]), scale.y(run[0][3]), 2.5, 0, 7); pen.fill(); }
    start = stop;
  }
}

function dots(pen, scale, rows) {
  pen.lineWidth = 2;
  pen.strokeStyle = style("evaluation");
  pen.fillStyle = style("card");
  for (const row of rows) {
    if (row[3] === null) continue;
    pen.beginPath(); pen.arc(scale.x(row[0]), scale.y(row[3]), 3.5, 0, 7); pen.fill(); pen.stroke();
  }
}

function marks(pen, scale, box, { restarts, saves, line }) {
  const bottom = box.height - BOTTOM;
  pen.fillStyle = style("quiet");
  for (const { step } of saves ?? []) {
    const x = scale.x(step);
    if (x < LEFT || x > box.width) continue;
    pen.beginPath(); pen.moveTo(x, bottom - 6); pen.lineTo(x - 3.5, bottom); pen.lineTo(x + 3.5, bottom); pen.fill();
  }
  pen.lineWidth = 1.5;
  pen.setLineDash([4, 4]);
  pen.strokeStyle = pen.fillStyle = style("warn");
  pen.font = FONT;
  pen.textBaseline = "top";
  for (const { step } of restarts ?? []) {
    const x = scale.x(step);
    pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, bottom); pen.stroke();
    pen.textAlign = x > box.width - 40 ? "right" : "center";
    pen.fillText("restart", x, 3);
  }
  if (line != null) {
    pen.strokeStyle = style("quiet");
    pen.beginPath(); pen.moveTo(LEFT, scale.y(line)); pen.lineTo(box.width - RIGHT, scale.y(line)); pen.stroke();
  }
  pen.setLineDash([]);
}

function crosshair(pen, scale, box, row, colour) {
  if (!row) return;
  const x = scale.x(row[0]);
  pen.lineWidth = 1;
  pen.strokeStyle = style("plain");
  pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, box.height - BOTTOM); pen.stroke();
  if (row[3] === null) return;
  pen.fillStyle = colour;
  pen.strokeStyle = style("card");
  pen.lineWidth = 2;
  pen.beginPath(); pen.arc(x, scale.y(row[3]), 4.5, 0, 7); pen.fill(); pen.stroke();
}
