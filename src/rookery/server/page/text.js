// Texts and tokens as the reader shows them. Pure functions: tests run them without a browser.
import { isNumber } from "./format.js";

const BLOCKS = /<(think|thinking|tool_call|tool_response|function_call)>([\s\S]*?)(<\/\1>|$)/g;

/** A reply as [{kind: "text" | "think" | "tool", text}]: reasoning and tool calls stand apart. Where the prompt opened the reasoning, as templates of some models do, the reply only closes it. */
export function segments(text) {
  const found = [], closed = text.match(/<\/(think|thinking)>/);
  let last = 0;
  if (closed && !text.slice(0, closed.index).includes(`<${closed[1]}>`)) {
    found.push({ kind: "think", text: text.slice(0, closed.index).trim() });
    text = text.slice(closed.index + closed[0].length);
  }
  for (const match of text.matchAll(BLOCKS)) {
    if (match.index > last) found.push({ kind: "text", text: text.slice(last, match.index) });
    found.push({ kind: match[1].startsWith("think") ? "think" : "tool", text: match[2].trim() });
    last = match.index + match[0].length;
  }
  if (last < text.length || found.length === 0) found.push({ kind: "text", text: text.slice(last) });
  return found.filter((one, _, all) => one.text !== "" || all.length === 1);
}

/** A prompt or another value of JSON as text. */
export const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

const SHORT = 500, SHORT_LINES = 12; // what fits into the box of a reply without scrolling

/** The tabindex of a box that scrolls where its text is long: the keyboard has to reach it. */
export const reach = (text) => (text.length > SHORT || text.split("\n").length > SHORT_LINES ? 0 : undefined);

/** The first characters of a text on one line. */
export function shorten(text, most = 160) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

/** How unlikely a token was, in steps from 0 (certain) to 5 (a surprise of 5 nats or more). */
export const surprise = (logprob) => (isNumber(logprob) ? Math.min(5, Math.max(0, Math.round(-logprob))) : 0);

const GAP_STEP = 0.05; // nats: bf16 alone gives gaps of 0.03

/** How far trainer and engine are apart, in steps of 0.05 nats with a sign, at most 5. */
export const gapStep = (gap) => (isNumber(gap) ? Math.sign(gap) * Math.min(5, Math.floor(Math.abs(gap) / GAP_STEP)) : 0);

/** The tokens of a trajectory: prompt and rest, with what marks each. */
export function stripTokens(trajectory) {
  const { prompt, prompt_texts: before, tokens, texts, mask, logprobs, versions, trainer_logprobs: trainer, workers, replies = [] } = trajectory;
  const moved = new Map(workers.slice(0));
  let version = null;
  const policies = new Array(tokens.length).fill("");
  for (const [start, stop, policy] of [...replies].reverse()) policies.fill(policy, start, stop);
  const rest = tokens.map((id, at) => {
    const sampled = mask[at], changed = sampled && version !== null && versions[at] !== version;
    if (sampled) version = versions[at];
    const theirs = sampled && trainer ? trainer[at] : null;
    return {
      id, text: texts?.[at] ?? `⟨${id}⟩`, sampled, logprob: sampled ? logprobs[at] : null, trainer: theirs,
      gap: isNumber(theirs) ? theirs - logprobs[at] : null, version: sampled ? versions[at] : null, changed, worker: moved.get(at) ?? null, policy: sampled ? policies[at] : "",
    };
  });
  const prefix = prompt.map((id, at) => ({ id, text: before?.[at] ?? `⟨${id}⟩`, sampled: false, logprob: null, trainer: null, gap: null, version: null, changed: false, worker: null, policy: "" }));
  return [...prefix, ...rest];
}

/** The messages of an episode with their turns: [{message, turn, number, branch}]. `turn` is null for what no policy wrote; `branch` is the turn from which an agent continues where that is not the one before (-1: from none), at the first message of it, else null. */
export function turnsOf({ messages, turns }) {
  const number = new Map(turns.map((turn, at) => [turn.message, at]));
  let next = 0, begins = true;
  return (messages ?? []).map((message, place) => {
    const at = number.get(place) ?? null, branch = begins ? turns[next]?.follows ?? null : null;
    begins = at !== null;
    if (begins) next = at + 1;
    return { message, turn: at === null ? null : turns[at], number: at, branch };
  });
}

/** A model as sampling names it, JOB[/POLICY][@VERSION] or a base model's name, in its parts. */
export function partsOf(target, runs) {
  const [, job, policy = "", version = ""] = target.match(/^([^/@]*)(?:\/([^@]*))?(?:@(.*))?$/) ?? [], run = runs.find((one) => one.id === job);
  return run ? { run, job, policy, version } : { run: null, job: target, policy: "", version: "" };
}

export const targetOf = (job, policy, version) => `${job}${policy && `/${policy}`}${version && `@${version}`}`;
