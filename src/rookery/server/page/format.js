// Numbers, times and shapes as people read them. Pure functions: tests run them without a browser.
import { now } from "./clock.js";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number of any size in a few characters; a dash for none. */
export function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(1);
  for (const [limit, unit, letter] of [[999.95e9, 1e12, "T"], [999.95e6, 1e9, "G"], [999.95e3, 1e6, "M"], [9999.5, 1e3, "k"]]) { // the limits are those of what is shown
    if (size >= limit) return `${(value / unit).toFixed(1)}${letter}`;
  }
  if (Number.isInteger(value)) return count(value);
  if (size < 10 ** -digits / 2) return size < 0.001 ? value.toExponential(1) : value.toPrecision(2);
  return size >= 99.95 ? count(value) : value.toFixed(size >= 10 - 10 ** -digits / 2 ? 1 : digits);
}

/** A reward or a mean of rewards, with the same decimals whatever its value: in a column the points stand below each other. */
export const reward = (value) => (Number.isInteger(value) && Math.abs(value) < 1e4 ? value.toFixed(3) : number(value));

export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : "–");

export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %` : "–");

/** So many things, with the noun that agrees: "1 step", "2 steps". */
export const counted = (value, one, many = `${one}s`, shown = count) => (isNumber(value) ? `${shown(value)} ${value === 1 ? one : many}` : "–");

export const steps = (value) => counted(value, "step", "steps", (one) => number(one, 2));

export function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  return `${at ? value.toFixed(value >= 99.95 ? 0 : 1) : value} ${units[at]}`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 59.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(seconds), minutes = Math.round(seconds / 60);
  if (whole < 600 && whole % 60) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.round(hours / 24)} days`;
}

export const time = (unix) => (unix ? new Date(1000 * unix).toLocaleString("sv-SE").slice(0, 19) : "–");

/** The time since a moment, in whole seconds. */
export function ago(unix, at = now()) {
  if (!unix) return "–";
  const seconds = Math.max(0, Math.round(at - unix));
  return seconds < 10 ? `${seconds} s` : duration(seconds);
}

/** The path of a line through the values in a box; missing values are gaps, and a value between two of them is a dot. */
export function sparkPath(values, width, height) {
  const known = values.filter(isNumber);
  if (known.length === 0) return "";
  const low = Math.min(...known), high = Math.max(...known), span = high / 2 - low / 2 || 1; // in halves: the difference may exceed the largest number
  const step = values.length > 1 ? width / (values.length - 1) : 0;
  let path = "", begun = false;
  values.forEach((value, at) => {
    if (!isNumber(value)) { begun = false; return; }
    const y = height - 1 - ((value / 2 - low / 2) / span) * (height - 2);
    path += `${begun ? "L" : "M"}${(at * step).toFixed(1)} ${(high === low ? height / 2 : y).toFixed(1)}${begun ? "" : "h.01"}`;
    begun = true;
  });
  return path;
}

/** An exponential mean with the weight of the past (0: none); missing values stay missing. */
export function smooth(values, weight) {
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

/** A bin for each value where they are few, else bins of equal width: [{from, to, count}]. */
export function histogram(values, bins = 12) {
  const known = values.filter(isNumber).sort((a, b) => a - b), distinct = [...new Set(known)];
  if (distinct.length <= bins) return distinct.map((value) => ({ from: value, to: value, count: known.filter((one) => one === value).length }));
  const low = known[0], high = known[known.length - 1], width = high / bins - low / bins;
  const edges = Array.from({ length: bins + 1 }, (_, at) => (at === bins ? high : low + at * width));
  const found = edges.slice(0, -1).map((from, at) => ({ from, to: edges[at + 1], count: 0 }));
  for (const value of known) found[found.findIndex((bin, at) => inBin(value, bin, at === bins - 1))].count += 1;
  return found;
}

/** The same bins with the counts of other values. */
export const recounted = (bins, values) => bins.map((bin, at) => ({ ...bin, count: values.filter((value) => inBin(value, bin, at === bins.length - 1)).length }));

/** Whether a value lies in a bin of `histogram`. */
export const inBin = (value, bin, last) => isNumber(value) && (bin.from === bin.to ? value === bin.from : value >= bin.from && (last ? value <= bin.to : value < bin.to));

/** The choices of a list, with the one that is chosen where it is none of them any more. */
export const listed = (choices, chosen) => (!chosen || choices.includes(chosen) ? choices : [...choices, chosen]);

const decoded = (part) => { try { return decodeURIComponent(part); } catch { return part; } };

/** `#/run/ID/step/4?x=1` as {path: ["run", "ID", "step", "4"], query: {x: "1"}}. */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decoded), query: Object.fromEntries(new URLSearchParams(query)) };
}

export function route(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${path.map(encodeURIComponent).join("/")}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}
