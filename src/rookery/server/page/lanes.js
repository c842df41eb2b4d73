// The lanes of the timeline: which spans stand where, and what a view shows. Pure functions.
import { duration } from "./format.js";

/** Kinds of work by their place in a lane, each with its color. */
export const KINDS = { waiting: "--muted", prefill: "--c1", decode: "--c0", train: "--c2", environment: "--c5", transfer: "--c3", busy: "--muted", idle: "--line" };
export const MARKS = { joined: ["○", "--good", "joined", "joined"], preemption: ["▼", "--bad", "preemption", "preemptions"], migration: ["◆", "--warn", "migration", "migrations"], switch: ["▲", "--c3", "version switch", "version switches"], commit: ["●", "--c2", "commit", "commits"] };
const OF_WORKER = ["prefill", "decode", "train", "transfer", "busy"], OF_OWNER = ["waiting", "prefill", "decode", "train", "environment", "transfer"];

export const LANES_SHOWN = 60; // more would not fit a screen; the table says how many there are
export const SHORTEST = 0.005, LONGEST = 30 * 86400; // seconds of a view

/** Rows of spans of which none overlap: [[span]], by their start. */
export function packed(spans) {
  const rows = [];
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    const row = rows.find((one) => one[one.length - 1].end <= span.start);
    if (row) row.push(span); else rows.push([span]);
  }
  return rows;
}

/** Whether two spans are the same one, which each answer of the service has again. */
export const sameSpan = (a, b) => ["kind", "start", "worker", "job", "policy", "text"].every((name) => a[name] === b[name]);

/** Seconds in which any of the spans ran. A span that stands for several ran for a share of its time; where such ones overlap, as those of several policies do, their shares count as independent. */
export function seconds(spans) {
  const turns = spans.flatMap((span) => [[span.start, span, true], [span.end, span, false]]).sort((a, b) => a[0] - b[0]), running = new Set();
  let total = 0, last = 0;
  for (const [at, span, starts] of turns) {
    let still = 1;
    for (const { start, end, count, covered } of running) still *= count > 1 ? 1 - Math.min(1, covered / (end - start)) : 0;
    total += (1 - still) * (at - last);
    last = at;
    if (starts && span.end > span.start) running.add(span); else running.delete(span);
  }
  return total;
}

/** The part of a span within a view; of what it covered, as much of it. */
export function within(span, view) {
  const start = Math.max(span.start, view.start), end = Math.min(span.end, view.end);
  return { ...span, start, end, covered: span.covered * Math.max(0, end - start) / (span.end - span.start || 1) };
}

/** [{name, worker, strips: {kind: [span]}, marks: [span], idle: [span]}]: a lane of each worker, then of each tenant, or with `by` "job" of each job. */
export function lanesOf(spans, { by = "tenant", names = {} } = {}) {
  const workers = new Map(), owners = new Map();
  const lane = (of, key, name, kinds) => {
    if (!of.has(key)) of.set(key, { key, name, worker: of === workers, strips: Object.fromEntries(kinds.map((kind) => [kind, []])), marks: [], idle: [] });
    return of.get(key);
  };
  const put = (found, span) => {
    if (span.kind in MARKS) found.marks.push(span);
    else if (span.kind === "idle") found.idle.push(span);
    else found.strips[span.kind]?.push(span);
  };
  for (const span of spans) {
    if (span.worker) put(lane(workers, span.worker, span.worker, OF_WORKER), span);
    const owner = span[by];
    if (owner) put(lane(owners, owner, names[owner] ?? owner, OF_OWNER), span);
  }
  const sorted = (of) => [...of.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  for (const one of workers.values()) if (one.strips.busy.length === 0) delete one.strips.busy;
  return [...sorted(workers), ...sorted(owners)];
}

const MOST_SIDE = 16384, MOST_PIXELS = 16e6; // of a canvas: with more, some browsers show none

/** The pixels of a canvas for each of the page's: as many as the screen has, or as a canvas may have. */
export const scaleOf = (width, height, ratio) => Math.min(ratio, MOST_SIDE / Math.max(width, height, 1), Math.sqrt(MOST_PIXELS / Math.max(width * height, 1)));

/** The view `factor` times as long around the moment at the share `at` of its width. */
export function zoomed({ start, end }, factor, at = 0.5) {
  const length = Math.min(LONGEST, Math.max(SHORTEST, (end - start) * factor)), middle = start + at * (end - start);
  const from = Math.max(0, middle - at * length);
  return { start: from, end: from + length };
}

export const moved = ({ start, end }, share) => {
  const by = Math.max(-start, share * (end - start));
  return { start: start + by, end: end + by };
};

const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];

/** Moments of the axis with their labels, at least `room` pixels apart: [{at, label}]. */
export function ticks({ start, end }, width, room = 90) {
  const least = ((end - start) * room) / Math.max(room, width), step = STEPS.find((one) => one >= least) ?? STEPS[STEPS.length - 1];
  const offset = step >= 3600 ? -60 * new Date(1000 * start).getTimezoneOffset() : 0; // days begin at local midnight
  const found = [];
  for (let number = Math.ceil((start + offset) / step); number * step - offset <= end; number += 1) found.push({ at: number * step - offset, label: clock(number * step - offset, step) });
  return found;
}

/** A moment as an axis with so long steps needs it. */
export function clock(unix, step) {
  const date = new Date(1000 * unix), text = date.toLocaleString("sv-SE");
  if (step >= 86400) return text.slice(5, 10);
  if (step >= 60) return text.slice(11, 16);
  if (step >= 1) return text.slice(11, 19);
  return `${text.slice(14, 19)}.${String(Math.round(1000 * (unix - Math.floor(unix)))).padStart(3, "0")}`;
}

/** One line about a span. */
export function about(span, names = {}) {
  const length = span.kind in MARKS ? clock(span.start, 0.001) : duration(span.end - span.start);
  const several = span.count > 1 ? `${span.count} together, ${duration(span.covered)} of it` : "";
  return [span.kind, length, span.worker && `worker ${span.worker}`, span.job && `run ${names[span.job] ?? span.job}`, span.text, several].filter(Boolean).join(" · ");
}
