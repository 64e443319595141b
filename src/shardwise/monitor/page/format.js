// Values as text: counts, bytes, durations.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (value) => value == null ? "–" : Math.round(value).toLocaleString("en");

/** Four significant digits, without trailing zeros. */
export function number(value) {
  if (value == null) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return Math.abs(value) >= 1000 ? count(value) : String(+value.toPrecision(4));
}

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) { value /= 1024; unit++; }
  return `${+value.toPrecision(3)} ${UNITS[unit]}`;
}

/** The unit in which bytes() shows a value. */
export const byteUnit = (value) => 1024 ** Math.max(0, Math.floor(Math.log(Math.max(1, value) * 1.024) / Math.log(1024)));

export function rate(value) {
  if (value == null) return "–";
  return value >= 100 ? count(value) : String(+value.toPrecision(3));
}

/** A duration in its two largest units. */
export function time(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${days} d ${hours % 24} h`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function parameters(value) {
  if (value == null) return "";
  const [size, unit] = value >= 1e9 ? [1e9, " billion"] : value >= 1e6 ? [1e6, " million"] : [1, ""];
  return `${size === 1 ? count(value) : +(value / size).toPrecision(3)}${unit} parameters`;
}
