// The page's pure functions, by node's own runner: node --test tests/page
import assert from "node:assert/strict";
import { test } from "node:test";
import * as clock from "../../src/rookery/server/page/clock.js";
import * as format from "../../src/rookery/server/page/format.js";

test("numbers have few characters at any size, and a dash where there is none", () => {
  const table = [[0, "0"], [3, "3"], [0.5, "0.500"], [12.34, "12.3"], [123.4, "123"], [12345, "12.3k"], [2.5e6, "2.5M"], [3e9, "3.0G"], [1e-5, "1.0e-5"], [-0.25, "-0.250"], [null, "–"], [NaN, "–"], [Infinity, "–"], ["x", "–"], [1e300, "1.0e+300"]];
  for (const [value, text] of table) assert.equal(format.number(value), text);
  for (const value of [1e-300, 1e-3, 0.0999, 9999, 99999.5, 1e14]) assert.ok(format.number(value).length <= 8);
});

test("a value just below a unit is shown in that unit, not as a thousand of the one before", () => {
  const tables = {
    number: [[9.9996, "10.0"], [9.9994, "9.999"], [99.96, "100"], [9999, "9,999"], [9999.7, "10.0k"], [999940, "999.9k"], [999960, "1.0M"], [999960000, "1.0G"], [-999960, "-1.0M"]],
    duration: [[0.9994, "999 ms"], [0.9996, "1.0 s"], [9.96, "10 s"], [59.4, "59 s"], [59.6, "1 min"], [89, "1 min 29 s"], [599.6, "10 min"], [3599, "1 h 0 min"]],
    bytes: [[999, "999 B"], [99960, "100 kB"], [999400, "999 kB"], [999600, "1.0 MB"]],
  };
  for (const [name, table] of Object.entries(tables)) for (const [value, text] of table) assert.equal(format[name](value), text, `${name} of ${value}`);
});

test("a small value with few decimals is still a number that people read", () => {
  assert.deepEqual([[0.4, 0], [0.004, 2], [0.0004, 2], [0.04, 1]].map(([value, digits]) => format.number(value, digits)), ["0.40", "0.0040", "4.0e-4", "0.040"]);
});

test("the time since a moment is in whole seconds of the service's clock, whatever the reader's says", () => {
  assert.deepEqual([100, 99.7, 97, 50, 200, 0].map((moment) => format.ago(moment, 100)), ["0 s", "0 s", "3 s", "50 s", "0 s", "–"]);
  const own = Date.now() / 1000, service = own - 86400;
  const since = () => format.ago(service - 5 * 3600);
  try {
    clock.heard(new Date(1000 * service).toUTCString(), own);
    assert.equal(since(), "5 h 0 min");
    clock.heard("no date", own);
    clock.heard(null, own);
    assert.equal(since(), "5 h 0 min", "what is no date changes nothing");
  } finally { clock.heard(new Date(1000 * own).toUTCString(), own); }
  assert.ok(Math.abs(clock.now() - Date.now() / 1000) < 1, "a header of whole seconds is not exact");
});

test("a number and its noun agree", () => {
  assert.deepEqual([0, 1, 2].map((value) => format.counted(value, "step")), ["0 steps", "1 step", "2 steps"]);
  assert.deepEqual([1, 2].map((value) => format.counted(value, "reply", "replies")), ["1 reply", "2 replies"]);
  assert.equal(format.counted(1234, "token"), "1,234 tokens");
  assert.equal(format.counted(null, "step"), "–");
});

test("rewards of a column have the same decimals", () => {
  const table = [[1, "1.000"], [0, "0.000"], [-2, "-2.000"], [0.5, "0.500"], [0.596, "0.596"], [12345, "12.3k"], [null, "–"], [NaN, "–"]];
  for (const [value, text] of table) assert.equal(format.reward(value), text);
});

test("durations and sizes carry their unit", () => {
  for (const [seconds, text] of [[0, "0 s"], [0.02, "20 ms"], [1.5, "1.5 s"], [42, "42 s"], [600, "10 min"], [7300, "2 h 2 min"], [260000, "3 days"], [null, "–"]]) assert.equal(format.duration(seconds), text);
  for (const [size, text] of [[0, "0 B"], [999, "999 B"], [1500, "1.5 kB"], [2.5e9, "2.5 GB"], [undefined, "–"]]) assert.equal(format.bytes(size), text);
  assert.equal(format.percent(0.05), "5.0 %");
  assert.equal(format.percent(1), "100 %");
  assert.deepEqual([0, 1, 1.5, null].map(format.steps), ["0 steps", "1 step", "1.50 steps", "–"]);
});

test("a sparkline has gaps where values are missing and stays in its box", () => {
  const path = format.sparkPath([1, null, 2, NaN, 3, 4], 100, 20);
  assert.equal(path.match(/M/g).length, 3);
  assert.ok(path.startsWith("M0.0 19.0h.01M"), "a value between gaps is a dot");
  for (const [, y] of path.matchAll(/[ML][\d.]+ ([\d.]+)/g)) assert.ok(y >= 0 && y <= 20);
  assert.equal(format.sparkPath([], 100, 20), "");
  for (const values of [[5, 5, 5], [1.7e308, -1.7e308, 0]]) assert.ok(!/NaN|Infinity/.test(format.sparkPath(values, 100, 20)));
});

test("smoothing keeps a constant, starts at the first value and keeps gaps", () => {
  assert.deepEqual(format.smooth([2, 2, 2], 0.9).map((x) => Math.round(x * 1e9) / 1e9), [2, 2, 2]);
  assert.deepEqual(format.smooth([1, null, 3], 0), [1, null, 3]);
  assert.equal(format.smooth([null, 4], 0.5)[1], 4);
});

test("every value is in exactly one bin of its histogram", () => {
  for (const values of [[0, 1, 0, 1], [5], [0.1, 0.2, 0.3, 0.9, 1], [-3, 0, 3], [1e300, -1e300], Array.from({ length: 99 }, (_, at) => Math.sin(at)), Array.from({ length: 40 }, (_, at) => (at - 20) * 1e306)]) {
    const bins = format.histogram(values);
    assert.equal(bins.reduce((sum, bin) => sum + bin.count, 0), values.length);
    for (const value of values) assert.equal(bins.filter((bin, at) => format.inBin(value, bin, at === bins.length - 1)).length, 1, String(value));
  }
  assert.deepEqual(format.histogram([null, NaN]), []);
});

test("a route survives its address", () => {
  const path = ["run", "a b/ü%", "step", "3"], query = { text: "x&y=#", empty: "" };
  assert.deepEqual(format.parseRoute(format.route(path, query)), { path, query: { text: "x&y=#" } });
  assert.deepEqual(format.parseRoute("#/run/100%/steps").path, ["run", "100%", "steps"]);
});

test("bins that are chosen from count later values between the same bounds", () => {
  const bins = format.histogram(Array.from({ length: 24 }, (_, at) => at)), later = [0, 1, 22.9, 23, 24, -1, null];
  const counts = format.recounted(bins, later).map((bin) => bin.count);
  assert.deepEqual([counts[0], counts.at(-1), counts.reduce((sum, count) => sum + count, 0)], [2, 2, 4]);
  assert.deepEqual(format.recounted(bins, later).map(({ from, to }) => [from, to]), bins.map(({ from, to }) => [from, to]));
});

test("a list has the choice that is made, also where it is none of its choices any more", () => {
  for (const [chosen, expected] of [["", ["a", "b"]], [undefined, ["a", "b"]], ["b", ["a", "b"]], ["c", ["a", "b", "c"]]]) assert.deepEqual(format.listed(["a", "b"], chosen), expected);
});
