// The episode reader: the conversation turn by turn, what each turn earned, and the strip of its tokens.
import { useEffect, useMemo, useState } from "preact/hooks";
import { jobPath, useData } from "./api.js";
import { count, counted, duration, isNumber, number, reward, route } from "./format.js";
import { REFRESH, ofPolicy, prompts, Reply, trainedInto } from "./groups.js";
import { colored } from "./jobform.js";
import { Badge, Empty, Facts, Loading, Problem, html, signed } from "./parts.js";
import { Walk } from "./tokens.js";
import { gapStep, stripTokens, surprise, turnsOf } from "./text.js";

export function Episode({ job, view, path }) {
  const [running, setRunning] = useState(false);
  const { data, error } = useData(jobPath(job, "episodes", encodeURIComponent(path[3])), running ? REFRESH : 0);
  useEffect(() => setRunning(data?.state === "open"), [data]);
  if (!data) return html`<${Loading} error=${error} />`;
  const policies = colored(view.spec);
  return html`
    <div class="bar"><h2>Answer ${data.member + 1} of <a href=${route(["run", job, "group", data.group])}>group ${data.ordinal}</a></h2><${Badge} state=${data.state} />
      <nav class="right" aria-label="Answers of the group">${data.members.map((one) => html` <a class=${`button small ${one.episode === data.episode ? "chosen" : ""}`} aria-current=${one.episode === data.episode ? "true" : undefined} href=${route(["run", job, "episode", one.episode])}>${one.member + 1}: ${isNumber(one.reward) ? number(one.reward, 2) : one.state}</a>`)}</nav></div>
    ${data.error && html`<div class="notice bad"><pre>${data.error}</pre></div>`}
    <${Facts} facts=${[
      [`reward${ofPolicy(view)}`, reward(data.reward)], [`advantage${ofPolicy(view)}`, signed(data.advantage)], ["ended by", data.finish === "done" ? "" : data.finish?.replace("_", " ")],
      [`oldest version${policies.length > 1 ? ` of ${Object.keys(view.spec.policies)[0]}` : ""}`, data.version], ["trained into version", trainedInto(data)],
      ["queue", data.seconds ? duration(data.seconds.queue ?? 0) : ""], ["generation", data.seconds ? duration(data.seconds.generation ?? 0) : ""], ["environment", data.seconds ? duration(data.seconds.environment ?? 0) : ""],
      ...Object.entries(data.metrics ?? {}).map(([name, value]) => [name, number(value)]),
    ]} />
    <div class="conversation">${data.messages === null && !data.error ? html`${data.prompt !== null && html`<section class="panel"><h2 class="sub">Prompt</h2><pre>${prompts(data.prompt)}</pre></section>`}<${Empty}>The text of this episode is not kept any more. Its reward and metrics are.<//>` : turnsOf(data).map(({ message, turn, number: of, branch }, at) => html`
      ${branch !== null && html`<h3 class="branch muted small">${branch < 0 ? "Another conversation of the agent" : `A branch: the agent continues from turn ${branch + 1}`}</h3>`}
      <${Message} key=${at} message=${message} number=${of} turn=${turn} policies=${policies} />`)}</div>
    ${data.trajectories.map((one, at) => html`<${TokenStrip} key=${at} trajectory=${one} policies=${policies} trained=${data.consumed_by !== null} ended=${view.finished > 0} title=${data.trajectories.length > 1 ? `Tokens, sequence ${at + 1}` : "Tokens"} />`)}`;
}

function Message({ message, turn, number: at, policies }) {
  const several = turn && policies.length > 1, color = several ? policies.indexOf(turn.policy) % 6 : 0;
  const rewards = !turn ? [] : [...(turn.reward || Object.keys(turn.rewards).length === 0 ? [["reward", turn.reward]] : []), ...Object.entries(turn.rewards).map(([name, value]) => [several ? `reward of ${name}` : name, value])];
  return html`<article class=${`message ${policies.length > 1 ? "" : message.role} ${several ? `p${color}` : ""}`}><header><b>${message.role}</b>${message.role === "assistant" && html` <span class="muted small">${turn ? `turn ${at + 1}${turn.trained ? "" : ", not trained on"}` : "of the prompt"}</span>`}${several && html` <span><i class=${`swatch s${color}`}></i>${turn.policy}</span>`}
      ${turn && html`<span class="right small muted">${rewards.map(([name, value]) => html`${name} <b class=${value > 0 ? "good" : value < 0 ? "bad" : ""}>${signed(value)}</b> · `)}${counted(turn.tokens, "token")}, ended by ${turn.finish} · queue ${duration(turn.queue_seconds)}, generation ${duration(turn.generation_seconds)}, environment ${duration(turn.environment_seconds)}</span>`}</header>
    ${message.role === "assistant" ? html`<${Reply} text=${message.content} />` : html`<pre>${message.content}</pre>`}
    ${turn && Object.keys(turn.metrics).length > 0 && html`<p class="small muted metrics">${Object.entries(turn.metrics).map(([name, value]) => `${name} ${number(value)}`).join(" · ")}</p>`}</article>`;
}

const MARKER = /^<.*>$/s; // of a template: its letters stay together in a line that runs from right to left

const COLORED = { logprob: "log-probability", gap: "trainer − engine", version: "version", policy: "policy" };

/** The tokens as the engine sampled them. Those of the environment or the template are dimmed. A letter of several tokens stands at the last one; the others are dots. */
export function TokenStrip({ trajectory, title, trained, ended, policies = [] }) {
  const [by, setBy] = useState("logprob");
  const tokens = useMemo(() => stripTokens(trajectory), [trajectory]), sampled = tokens.filter((one) => one.sampled);
  const gaps = sampled.map((one) => one.gap).filter(isNumber);
  const versions = [...new Set(sampled.map((one) => one.version))];
  const choices = Object.entries(COLORED).filter(([name]) => (name !== "gap" || gaps.length) && (name !== "version" || versions.length > 1) && (name !== "policy" || policies.length > 1));
  const shade = (one) => {
    if (!one.sampled) return "masked";
    if (by === "gap") { const step = gapStep(one.gap); return step ? `gap${step > 0 ? "p" : "n"}${Math.abs(step)}` : ""; }
    if (by === "version") return `v${versions.indexOf(one.version) % 6}`;
    if (by === "policy") return one.policy ? `v${policies.indexOf(one.policy) % 6}` : "";
    return `lp${surprise(one.logprob)}`;
  };
  const spans = useMemo(() => tokens.map((token, place) => html`${token.worker && html`<span class="mark worker">▸ ${token.worker} </span>`}${token.changed && html`<span class="mark version">▸ version ${token.version} </span>`}<span key=${place} data-at=${place} class=${`token ${shade(token)} ${MARKER.test(token.text) ? "marker" : ""}`}>${token.text || "·"}</span>`), [tokens, by, policies.join()]);
  const about = (at) => {
    const one = tokens[at], trainer = isNumber(one.trainer) ? `, ${number(one.trainer, 4)} (trainer), gap ${signed(one.gap, 4)} nats` : "";
    return html`<b>${JSON.stringify(one.text)}</b> token ${one.id}${one.sampled ? ` · log-probability ${number(one.logprob, 4)} (engine)${trainer} · version ${one.version}${one.policy && policies.length > 1 ? ` of ${one.policy}` : ""}` : " · of the prompt, the environment or the template: not trained on"}`;
  };
  const hint = html`<span class="mouse">Point at a token for its numbers, or use the arrow keys.</span><span class="touch">Touch a token for its numbers.</span> ${sampled.length === 0 ? "" : by === "logprob" ? "The stronger the color, the less likely." : by === "gap" ? "Orange: the trainer finds it likelier; blue: less likely." : by === "policy" ? html`A color for each policy: ${policies.map((name, place) => html` <i class=${`swatch s${place % 6}`}></i>${name}`)}` : "A color for each version."}`;
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  return html`<section class="panel strip"><div class="bar"><h2 class="sub">${title}</h2>
      <span class="muted small">${sampled.length === 0 ? "read, not trained on" : html`${count(sampled.length)} sampled${versions.length > 1 ? ` by versions ${versions.join(", ")}` : versions.length ? ` by version ${versions[0]}` : ""}, mean log-probability ${number(mean(sampled.map((token) => token.logprob)))} nats${gaps.length ? `, largest gap ${number(gaps.reduce((most, gap) => Math.max(most, Math.abs(gap)), 0), 4)} nats` : trained ? (policies.length > 1 ? ", those of the trainer are not kept with several policies" : ", the trainer computed no gradient of them") : ended ? ", not trained on" : ", not trained on yet"}`}</span>
      <span class="right">${choices.length > 1 && sampled.length > 0 && choices.map(([name, label]) => html`<button key=${name} class="small" aria-pressed=${by === name} onClick=${() => setBy(name)}>${label}</button>`)}</span></div>
    <${Walk} spans=${spans} count=${tokens.length} first=${tokens.length - sampled.length} about=${about} hint=${hint} scrollTo=${trajectory} /></section>`;
}
