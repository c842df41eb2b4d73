// The reader's pure functions, by node's own runner: node --test tests/page
import assert from "node:assert/strict";
import { test } from "node:test";
import * as text from "../../src/rookery/server/page/text.js";

test("reasoning and tool calls stand apart, also where they do not end", () => {
  assert.deepEqual(text.segments("a<think>b</think>c"), [{ kind: "text", text: "a" }, { kind: "think", text: "b" }, { kind: "text", text: "c" }]);
  assert.deepEqual(text.segments("<tool_call>{}</tool_call>"), [{ kind: "tool", text: "{}" }]);
  assert.deepEqual(text.segments("<think>endless"), [{ kind: "think", text: "endless" }]);
  assert.deepEqual(text.segments(""), [{ kind: "text", text: "" }]);
  assert.deepEqual(text.segments("<b>bold</b>"), [{ kind: "text", text: "<b>bold</b>" }]);
});

test("reasoning that the prompt has opened ends where the reply closes it", () => {
  assert.deepEqual(text.segments("so 4.\n</think>\n4"), [{ kind: "think", text: "so 4." }, { kind: "text", text: "\n4" }]);
  assert.deepEqual(text.segments("a</thinking><tool_call>{}</tool_call>"), [{ kind: "think", text: "a" }, { kind: "tool", text: "{}" }]);
  assert.deepEqual(text.segments("</think>4"), [{ kind: "text", text: "4" }]);
  assert.deepEqual(text.segments("a<think>b</think>c</think>d"), [{ kind: "text", text: "a" }, { kind: "think", text: "b" }, { kind: "text", text: "c</think>d" }]);
});

test("a strip marks masked tokens, new versions, other workers and gaps", () => {
  const tokens = text.stripTokens({
    prompt: [9], prompt_texts: ["p"], tokens: [1, 2, 3, 4], texts: ["a", "b", "c", "d"], mask: [true, false, true, true],
    logprobs: [-1, 0, -2, -0.1], versions: [3, -1, 3, 4], trainer_logprobs: [-1.2, null, -2, -0.1], workers: [[0, "w1"], [3, "w2"]],
  });
  assert.deepEqual(tokens.map((one) => one.sampled), [false, true, false, true, true]);
  assert.deepEqual(tokens.map((one) => one.changed), [false, false, false, false, true]);
  assert.deepEqual(tokens.map((one) => one.worker), [null, "w1", null, null, "w2"]);
  assert.ok(Math.abs(tokens[1].gap + 0.2) < 1e-9);
  assert.equal(tokens[2].logprob, null);
});

test("a strip without a tokenizer or a gradient shows ids", () => {
  const [token] = text.stripTokens({ prompt: [], prompt_texts: null, tokens: [7], texts: null, mask: [true], logprobs: [-1], versions: [0], trainer_logprobs: null, workers: [] });
  assert.equal(token.text, "⟨7⟩");
  assert.equal(token.gap, null);
});

test("replies have their turns, whatever else is in a conversation, and branches are named", () => {
  const said = (role) => ({ role, content: "" }), turn = (message, follows = null) => ({ message, follows });
  const messages = ["user", "assistant", "user", "assistant", "user", "assistant", "user", "assistant", "user", "assistant"].map(said);
  const found = text.turnsOf({ messages, turns: [turn(3), turn(5, 0), turn(9, -1)] });
  assert.deepEqual(found.map((one) => one.number), [null, null, null, 0, null, 1, null, null, null, 2]);
  assert.deepEqual(found.map((one) => one.branch), [null, null, null, null, 0, null, -1, null, null, null]);
  assert.deepEqual(text.turnsOf({ messages: null, turns: [] }), []);
});

test("the keyboard reaches a box whose text may scroll", () => {
  assert.deepEqual(["", "short", "x".repeat(501), "\n".repeat(12)].map(text.reach), [undefined, undefined, 0, 0]);
});

test("shades are bounded for any number", () => {
  for (const value of [0, -0.4, -3, -1e9, 5, NaN, null]) assert.ok([0, 1, 2, 3, 4, 5].includes(text.surprise(value)));
  for (const value of [0, 0.049, -0.3, 1e9, -1e9, null]) assert.ok(Math.abs(text.gapStep(value)) <= 5);
  assert.ok(text.gapStep(-0.3) < 0 && text.gapStep(0.049) === 0);
});

test("a target of sampling has the parts of which it is made", () => {
  const runs = [{ id: "job-1" }];
  for (const [target, ...parts] of [["job-1", "job-1", "", ""], ["job-1@3", "job-1", "", "3"], ["job-1/solver", "job-1", "solver", ""], ["job-1/solver@0", "job-1", "solver", "0"]]) {
    const found = text.partsOf(target, runs);
    assert.deepEqual([found.run, found.job, found.policy, found.version], [runs[0], ...parts]);
    assert.equal(text.targetOf(...parts), target);
  }
  for (const model of ["", "Qwen/Qwen3-0.6B", "a@b", "job-2/solver"]) assert.deepEqual(text.partsOf(model, runs), { run: null, job: model, policy: "", version: "" });
});

test("each sampled token knows the policy of its reply", () => {
  const trajectory = { prompt: [1], prompt_texts: ["p"], tokens: [2, 3, 4, 5], texts: ["a", "b", "c", "d"], mask: [true, false, true, true], logprobs: [0, 0, 0, 0], versions: [0, -1, 2, 2], trainer_logprobs: null, workers: [], replies: [[0, 1, "guesser"], [2, 4, "checker"]] };
  assert.deepEqual(text.stripTokens(trajectory).map((one) => one.policy), ["", "guesser", "", "checker", "checker"]);
});
