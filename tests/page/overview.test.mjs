// The charts of a run, by node's own runner: node --test tests/page
import assert from "node:assert/strict";
import { test } from "node:test";
import { chartsOf, compared, sortedEvaluations } from "../../src/rookery/server/page/overview.js";

const reward = (rows, evaluations) => chartsOf(rows, evaluations).find((chart) => chart.title === "Reward").lines.map((line) => [line.label, line.values]);

test("a run with one policy has one line", () => {
  const rows = [{ step: 1, version: 1, reward: 0, kl: 0 }, { step: 2, version: 2, reward: 1, kl: 0 }];
  assert.deepEqual(reward(rows, [{ policy: "main", version: 0, mean: 0.25 }, { policy: "main", version: 2, mean: 0.5 }]), [["training", [0, 1]], ["held-out", [0.25, 0.5]]]);
  assert.deepEqual(chartsOf(rows).map((chart) => chart.title), ["Reward"], "a KL of zero is no chart");
});

test("each policy of a run has a line of its own steps and evaluations", () => {
  const rows = [{ step: 1, policy: "a", version: 1, reward: 0 }, { step: 2, policy: "b", version: 1, reward: 5, kl: 0.1 }, { step: 3, policy: "a", version: 2, reward: 1, kl: 0 }];
  assert.deepEqual(reward(rows, [{ policy: "a", version: 1, mean: 0.5 }, { policy: "b", version: 1, mean: 4 }]), [
    ["a: training", [0, null, 1]], ["b: training", [null, 5, null]], ["a: held-out", [0.5, null, null]], ["b: held-out", [null, 4, null]],
  ]);
  assert.ok(chartsOf(rows).some((chart) => chart.title === "KL to the start"));
});

test("a policy is named before the others have taken a step", () => {
  const rows = [{ step: 1, policy: "a", version: 1, reward: 0 }], start = { version: 0, mean: 0.5 };
  assert.deepEqual(reward(rows, [{ policy: "a", ...start }, { policy: "b", ...start }]), [["a: training", [0]], ["a: held-out", [0.5]], ["b: held-out", [0.5]]]);
  assert.deepEqual(compared([rows, rows], ["one", "two"]).charts[0].lines.map((line) => line.label), ["one: a", "two: a"]);
});

test("each policy of a run has its chart of seconds", () => {
  const rows = [{ step: 1, policy: "a", version: 1, "seconds/queue": 1 }, { step: 2, policy: "b", version: 1, "seconds/queue": 2, "seconds/train": 3 }];
  assert.deepEqual(chartsOf(rows).map((chart) => [chart.title, chart.lines.map((line) => [line.label, line.values])]), [
    ["Seconds by stage: a", [["queue", [1, null]]]], ["Seconds by stage: b", [["queue", [null, 2]], ["training", [null, 3]]]],
  ]);
});

test("a comparison names the line that it draws of several", () => {
  const rows = [{ step: 1, version: 1, reward: 1, length_mean: 3, length_max: 5, "seconds/queue": 1, "seconds/generation": 2 }];
  const { charts } = compared([rows, rows], ["a", "b"]);
  assert.deepEqual(charts.map((chart) => [chart.title, chart.unit, chart.lines.map((line) => line.values)]), [
    ["Reward", "mean of the step", [[1], [1]]], ["Reply length", "tokens, mean", [[3], [3]]], ["Seconds by stage", "s, generation", [[2], [2]]],
  ]);
});

test("several runs are compared by the charts of their overviews, on the union of their steps", () => {
  const row = (step, reward, more = {}) => ({ step, version: step, reward, ...more });
  const { steps, charts } = compared([[row(1, 0.1), row(3, 0.3)], [row(2, 0.9, { kl: 0.5 })], []], ["a", "b", "c"]);
  assert.deepEqual(steps, [1, 2, 3]);
  const reward = charts.find((chart) => chart.title === "Reward");
  assert.deepEqual(reward.lines.map((line) => [line.label, line.values]), [["a", [0.1, null, 0.3]], ["b", [null, 0.9, null]], ["c", [null, null, null]]]);
  assert.deepEqual(charts.find((chart) => chart.title === "KL to the start").lines.map((line) => line.values), [[null, null, null], [null, 0.5, null], [null, null, null]]);
  assert.deepEqual(compared([], []), { steps: [], charts: [] });
});

test("a compared run with several policies has a line for each", () => {
  const rows = [{ step: 1, policy: "a", version: 1, reward: 0.1 }, { step: 2, policy: "b", version: 1, reward: 0.7 }, { step: 3, policy: "a", version: 2, reward: 0.2 }];
  const { steps, charts } = compared([rows, [{ step: 2, version: 2, reward: 0.9 }]], ["both", "one"]);
  assert.deepEqual(steps, [1, 2, 3]);
  assert.deepEqual(charts.find((chart) => chart.title === "Reward").lines.map((line) => [line.label, line.values]), [
    ["both: a", [0.1, null, 0.2]], ["both: b", [null, 0.7, null]], ["one", [null, 0.9, null]],
  ]);
});

test("every chart but those of the environment is explained, of whatever run", () => {
  const row = { step: 1, version: 1, policy: "a", length_mean: 3, entropy: 1, kl: 1, logp_diff_mean: 0.1, zero_variance_share: 0.5, staleness_mean: 1, "seconds/queue": 1, grad_norm: 1, "reward/right": 1 };
  const charts = [...chartsOf([{ ...row, reward: 1 }]), ...chartsOf([{ ...row, rows: 16, loss: 1, accuracy: 0.5, margin: 0.1 }])];
  assert.equal(new Set(charts.map((chart) => chart.title)).size, 14);
  assert.deepEqual(charts.filter((chart) => Boolean(chart.about) === Boolean(chart.environment)).map((chart) => chart.title), []);
});

test("the lengths of a run on rows are those of its rows", () => {
  assert.deepEqual(chartsOf([{ step: 1, version: 1, rows: 16, loss: 1, length_mean: 30 }]).map((chart) => chart.title), ["Loss", "Row length"]);
});

test("evaluations are listed by policy, the newest version first", () => {
  const found = sortedEvaluations([{ policy: "a", version: 0 }, { policy: "a", version: 10 }, { policy: "b", version: 9 }], ["b", "a"]);
  assert.deepEqual(found.map((one) => [one.policy, one.version]), [["b", 9], ["a", 10], ["a", 0]]);
});

test("each policy of a run has the reward of its best constant reply", () => {
  const rows = [{ step: 1, version: 1, reward: 0 }], best = (reward) => ({ constant: { reward } }), dashed = (evaluations) => reward(rows, evaluations).filter(([label]) => label.endsWith("best constant reply"));
  assert.deepEqual(dashed([{ policy: "a", version: 0, mean: 1, ...best(0.25) }]), [["best constant reply", [0.25]]]);
  const policies = [{ policy: "a", version: 0, mean: 1, ...best(0.25) }, { policy: "b", version: 0, mean: 1, ...best(0.75) }, { policy: "c", version: 0, mean: 1, constant: null }];
  assert.deepEqual(dashed(policies), [["a: best constant reply", [0.25]], ["b: best constant reply", [0.75]]]);
});
