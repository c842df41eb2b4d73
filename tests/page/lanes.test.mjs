import assert from "node:assert/strict";
import { test } from "node:test";
import { about, clock, lanesOf, moved, packed, scaleOf, seconds, ticks, within, zoomed } from "../../src/rookery/server/page/lanes.js";

const span = (kind, start, end, more = {}) => ({ kind, start, end, worker: "", tenant: "", job: "", policy: "", text: "", count: 1, covered: 0, ...more });

test("spans that overlap are on rows of their own", () => {
  const spans = [span("decode", 0, 4), span("decode", 1, 2), span("decode", 2, 3), span("decode", 4, 5)];
  assert.deepEqual(packed(spans).map((row) => row.map((one) => one.start)), [[0, 4], [1, 2]]);
});

test("seconds count overlapping spans once and the covered part of joined ones", () => {
  assert.equal(seconds([]), 0);
  assert.equal(seconds([span("decode", 0, 4), span("decode", 1, 2), span("decode", 3, 6)]), 6);
  assert.equal(seconds([span("decode", 0, 10, { count: 3, covered: 4 }), span("decode", 20, 21)]), 5);
});

test("joined spans that overlap count by their shares, in whatever order", () => {
  const joined = (start, end, covered) => span("decode", start, end, { count: 9, covered });
  const close = (found, wanted) => assert.ok(Math.abs(found - wanted) < 1e-9, `${found} is not ${wanted}`);
  close(seconds([joined(0, 100, 10), joined(0, 100, 10)]), 19); // two policies in turns: nearly 20
  close(seconds([joined(0, 100, 100), joined(0, 100, 30)]), 100);
  close(seconds([joined(50, 150, 20), joined(0, 100, 10)]), seconds([joined(0, 100, 10), joined(50, 150, 20)]));
  close(seconds([joined(0, 100, 10), span("decode", 20, 60), span("decode", 40, 40)]), 46);
});

test("a view shows no more of a span than fits into it", () => {
  const view = { start: 100, end: 105 }, joined = span("decode", 60, 180, { count: 64, covered: 118 });
  const part = within(joined, view);
  assert.deepEqual([part.start, part.end], [100, 105]);
  assert.ok(seconds([part]) <= 5 && seconds([part]) > 4.9);
});

test("a lane of each worker comes before a lane of each tenant or run", () => {
  const spans = [
    span("decode", 0, 1, { worker: "b", tenant: "t", job: "j" }), span("train", 0, 1, { worker: "a", tenant: "t", job: "k" }), span("idle", 1, 2, { worker: "a" }),
    span("busy", 2, 3, { worker: "b" }), span("environment", 0, 1, { tenant: "t", job: "j" }), span("commit", 1, 1, { tenant: "t", job: "j" }), span("preemption", 4, 4, { worker: "b" }), span("connected", 0, 9, { worker: "b" }),
  ];
  const lanes = lanesOf(spans, { names: { t: "Tess" } });
  assert.deepEqual(lanes.map((lane) => [lane.name, lane.worker]), [["a", true], ["b", true], ["Tess", false]]);
  assert.deepEqual(Object.keys(lanes[0].strips), ["prefill", "decode", "train", "transfer"]);
  assert.equal(lanes[1].strips.busy.length, 1);
  assert.equal(lanes[0].idle.length, 1);
  assert.deepEqual(lanes[1].marks.map((one) => one.kind), ["preemption"]);
  assert.deepEqual(Object.values(lanes[2].strips).map((strip) => strip.length), [0, 0, 1, 1, 1, 0]);
  assert.deepEqual(lanesOf(spans, { by: "job" }).map((lane) => lane.name), ["a", "b", "j", "k"]);
});

test("a zoom keeps the moment under the pointer, from weeks to milliseconds", () => {
  assert.deepEqual(zoomed({ start: 100, end: 200 }, 0.5, 0.25), { start: 112.5, end: 162.5 });
  assert.deepEqual(zoomed({ start: 100, end: 200 }, 2), { start: 50, end: 250 });
  const least = zoomed({ start: 100, end: 100.006 }, 0.1);
  assert.ok(Math.abs(least.end - least.start - 0.005) < 1e-9);
  const most = zoomed({ start: 0, end: 1e7 }, 100);
  assert.equal(most.end - most.start, 30 * 86400);
  assert.deepEqual(moved({ start: 10, end: 20 }, -2), { start: 0, end: 10 });
});

test("the axis has some labels at every zoom", () => {
  for (const length of [0.005, 0.3, 7, 600, 40000, 86400, 30 * 86400]) {
    const found = ticks({ start: 1.7e9 + 0.1234, end: 1.7e9 + 0.1234 + length }, 1000);
    assert.ok(found.length >= 1 && found.length <= 12, `${found.length} labels over ${length} s`);
    assert.ok(found.every((tick) => tick.at >= 1.7e9 && tick.at <= 1.7e9 + 0.1234 + length));
  }
  assert.match(clock(1.7e9 + 0.25, 0.05), /\.250$/);
});

test("a picture has the pixels of the screen, and never more than a browser draws", () => {
  assert.equal(scaleOf(1280, 900, 2), 2);
  assert.equal(scaleOf(0, 0, 3), 3);
  for (const [width, height] of [[390, 5800], [1480, 5800], [3800, 60], [20000, 10]]) {
    const scale = scaleOf(width, height, 3);
    assert.ok(width * scale <= 16384 && height * scale <= 16384 && width * height * scale ** 2 <= 16e6 + 1, `${width} x ${height}`);
  }
});

test("a line about a span has its length, or the moment", () => {
  assert.equal(about(span("decode", 1, 1.25, { worker: "w", job: "j", text: "request" }), { j: "sums" }), "decode · 250 ms · worker w · run sums · request");
  assert.equal(about(span("decode", 0, 10, { count: 4, covered: 2 })), "decode · 10 s · 4 together, 2.0 s of it");
});
