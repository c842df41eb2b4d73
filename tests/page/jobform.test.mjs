// The pure functions of the form of a job, by node's own runner: node --test tests/page
import assert from "node:assert/strict";
import { test } from "node:test";
import * as form from "../../src/rookery/server/page/jobform.js";

test("YAML quotes what YAML would read as something else", () => {
  const spec = { name: "a: b", on: "yes", text: "1.5", empty: "", list: [1, "x", { a: 1 }], none: {}, deep: { er: { none: null } }, lines: "a\nb", hash: "a #b" };
  assert.equal(form.toYaml(spec), 'name: "a: b"\n"on": "yes"\ntext: "1.5"\nempty: ""\nlist:\n  - 1\n  - x\n  - {"a":1}\nnone: {}\ndeep:\n  er:\n    none: null\nlines: "a\\nb"\nhash: "a #b"\n');
});

test("YAML reads every number as a number", () => {
  assert.equal(form.toYaml({ lr: 1e-7, big: 1e21, x: 1.5e-7, deep: { list: [{ a: -1e-9, b: "1e-7" }] } }), 'lr: 1.0e-7\nbig: 1.0e+21\nx: 1.5e-7\ndeep:\n  list:\n    - {"a":-1.0e-9,"b":"1e-7"}\n');
});

test("a field that is emptied leaves the job, with the objects that held it", () => {
  assert.deepEqual(form.set({ a: { b: { c: 1 } }, d: 2 }, ["a", "b", "c"], undefined), { d: 2 });
  assert.deepEqual(form.set({}, ["a", "b"], 1), { a: { b: 1 } });
  assert.equal(form.at({ a: null }, ["a", "b"]), undefined);
  assert.equal(form.parseField("number", " "), undefined);
  assert.equal(form.parseField("integer", "8"), 8);
  assert.throws(() => form.parseField("json", "{"));
});

test("fields follow references and leave null out", () => {
  const schemas = { Job: { properties: { stop: { $ref: "#/components/schemas/Stop" }, kind: { $ref: "#/x/Kind", default: "b" } } }, Stop: { type: "object", properties: { steps: { anyOf: [{ type: "integer" }, { type: "null" }], default: null } } }, Kind: { enum: ["a", "b"] } };
  const [stop, kind] = form.fieldsOf({ schemas }, schemas.Job);
  assert.deepEqual([stop.kind, stop.fields[0].kind, stop.fields[0].path], ["object", "integer", ["stop", "steps"]]);
  assert.deepEqual([kind.kind, kind.choices, kind.default], ["choice", ["a", "b"], "b"]);
});

test("a run from a version names it", () => {
  const view = { id: "job-1", spec: { name: "x", base_model: "m", policies: { main: { rank: 4 } }, stop: { steps: 1 } } };
  assert.deepEqual(form.likeJob(view, 3).policies.main, { rank: 4, warm_start: { job: "job-1", policy: "main", version: 3 } });
  assert.deepEqual(form.likeJob({ ...view, spec: { ...view.spec, stop: { steps: 1, reward: null } } }).stop, { steps: 1 });
  assert.deepEqual(form.likeJob(view).policies.main, { rank: 4 });
});

test("a run from a version keeps every policy, and starts those that train from their versions", () => {
  const policies = { judge: { train: false, base: true }, solver: { rank: 4 }, critic: { rank: 8, train: true } };
  const view = { id: "job-1", spec: { name: "x", base_model: "m", policies, stop: { steps: 1 } } };
  assert.deepEqual(form.trained(view.spec), ["solver", "critic"]);
  assert.deepEqual(form.likeJob(view, 0).policies, {
    judge: { train: false, base: true },
    solver: { rank: 4, warm_start: { job: "job-1", policy: "solver", version: 0 } },
    critic: { rank: 8, train: true, warm_start: { job: "job-1", policy: "critic" } },
  });
  assert.deepEqual(form.likeJob(view).policies, policies);
});

test("a field is described by a sentence", () => {
  assert.equal(form.brief("Weight of a penalty (k3), per token. Not with full."), "Weight of a penalty (k3), per token.");
  assert.equal(form.brief("Which loss"), "Which loss");
  assert.equal(form.brief("At most 0.5 of it; more is cut"), "At most 0.5 of it.");
  assert.equal(form.brief("How rewards become gradients: algorithm."), "How rewards become gradients.");
  assert.equal(form.brief("sft, dpo: rows of one optimizer step, 16 when absent."), "sft, dpo: rows of one optimizer step, 16 when absent.");
  assert.equal(form.brief(""), "");
});

test("a run like another one has all of its settings, whatever fields a job has", () => {
  const spec = { name: "x", base_model: "m", policies: { main: { rank: 4 } }, checkpoints: { keep_last: 9 }, sinks: [{ kind: "wandb" }], metadata: { paper: "a" }, seed: 7, shuffle: false, later: { field: 1 } };
  assert.deepEqual(form.likeJob({ id: "job-1", spec }), spec);
  const { name, policies, ...rest } = form.likeJob({ id: "job-1", spec }, 3), { name: _, policies: __, ...others } = spec;
  assert.deepEqual(rest, others);
  assert.equal(name, "x-more");
});

test("policies that train have the first colors, as in the charts", () => {
  assert.deepEqual(form.colored({ policies: { solver: {}, judge: { train: false }, critic: { train: true } } }), ["solver", "critic", "judge"]);
});

test("whole numbers that a browser rounds are named", () => {
  const spec = JSON.parse('{"seed":9007199254740991,"evaluation":{"seed":1152921504606846977},"policies":{"a":{"seed":9223372036854775807,"rank":4}},"lr":0.1,"clip":1e30,"none":null}');
  assert.deepEqual(form.inexact(spec), ["evaluation.seed", "policies.a.seed"]);
});
