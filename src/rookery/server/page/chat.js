// Two models side by side: the base beside a version, or two versions, with the same messages.
import { useEffect, useState } from "preact/hooks";
import { call, jobPath, useData } from "./api.js";
import { number } from "./format.js";
import { Empty, Problem, html } from "./parts.js";
import { partsOf, surprise, targetOf } from "./text.js";

const SAMPLES = 8; // at once: what fits beside each other

/** The replies of `model` to a conversation, with the log-probability of each token. */
async function ask(model, messages, { n, temperature, maxTokens, seed }) {
  const body = { model, messages, n, temperature, max_tokens: maxTokens, logprobs: true, ...(seed === "" ? {} : { seed: Number(seed) }) };
  const answer = await call("POST", "/v1/chat/completions", body);
  return answer.choices.map((one) => ({ text: one.message.content, finish: one.finish_reason, tokens: one.logprobs?.content ?? [] }));
}

/** The messages before and with a turn, as one side has them: its own replies, the chosen sample of each turn. */
export const history = (turns, last) => turns.slice(0, last + 1).flatMap((turn, at) => [{ role: "user", content: turn.user }, ...(at < last ? [{ role: "assistant", content: turn.samples[turn.chosen]?.text ?? "" }] : [])]);

export function Chat({ query, account }) {
  const { data: models } = useData("/api/v1/models"), { data: runs } = useData("/api/v1/runs?limit=200");
  const [targets, setTargets] = useState(["", query.target ?? ""]), [sides, setSides] = useState([[], []]);
  const [options, setOptions] = useState({ n: 1, temperature: 1, maxTokens: 128, seed: "" }), [text, setText] = useState(""), [busy, setBusy] = useState(false), [error, setError] = useState(null);
  const usable = (models ?? []).filter((one) => one.state === "loaded"), mine = (runs?.runs ?? []).filter((run) => run.tenant === account.name && run.step > 0);
  useEffect(() => {
    if (!targets[0] && usable.length) setTargets([mine.find((run) => targets[1].startsWith(run.id))?.base_model ?? usable[0].name, targets[1]]);
  }, [models, runs]);
  const play = async (side, users, target) => {
    const turns = [];
    for (const user of users) {
      turns.push({ user, samples: [], chosen: 0 });
      turns[turns.length - 1].samples = await ask(target, history(turns, turns.length - 1), options);
      setSides((old) => old.map((one, at) => (at === side ? [...turns] : one)));
    }
  };
  const run = async (work) => {
    setBusy(true);
    setError(null);
    try { await work(); } catch (problem) { setError(problem); }
    setBusy(false);
  };
  const send = (event) => {
    event.preventDefault();
    const user = text.trim();
    if (!user) return;
    setText("");
    run(() => Promise.all(targets.map(async (target, side) => {
      if (!target) return;
      const turns = [...sides[side], { user, samples: [], chosen: 0 }], last = turns.length - 1;
      const samples = await ask(target, history(turns, last), options);
      setSides((old) => old.map((one, at) => (at === side ? [...turns.slice(0, last), { user, samples, chosen: 0 }] : one)));
    })));
  };
  const replay = (side) => run(() => play(side, sides[side].length ? sides[side].map((turn) => turn.user) : sides[1 - side].map((turn) => turn.user), targets[side]));
  const choose = (side, turn, chosen) => setSides((old) => old.map((one, at) => (at === side ? one.map((given, place) => (place === turn ? { ...given, chosen } : given)) : one)));
  const option = (name, label, more) => html`<label>${label} <input class="short" type="number" value=${options[name]} ...${more} onInput=${(event) => setOptions({ ...options, [name]: name === "seed" ? event.target.value : Number(event.target.value) })} /></label>`;
  const users = sides.some((turns) => turns.length > 0);
  return html`<div class="bar"><h1>Chat</h1>${option("n", "samples", { min: 1, max: SAMPLES })}${option("temperature", "temperature", { min: 0, max: 10, step: 0.1 })}${option("maxTokens", "longest reply, tokens", { min: 1 })}${option("seed", "seed", { min: 0, placeholder: "any" })}
      ${users && html`<button class="right" onClick=${() => setSides([[], []])}>New conversation</button>`}</div>
    <${Problem} error=${error} />
    ${models && usable.length === 0 && html`<${Empty}>No base model is loaded yet: chat needs a worker.<//>`}
    <div class="two">${targets.map((target, side) => html`<section key=${side} class="panel side" aria-label=${side ? "Right" : "Left"}>
      <div class="bar"><${Target} value=${target} label=${side ? "Model on the right" : "Model on the left"} models=${usable} runs=${mine} onChange=${(value) => setTargets(targets.map((one, at) => (at === side ? value : one)))} />
        ${users && target && html`<button onClick=${() => replay(side)} disabled=${busy} title="Sends the same messages to this model again">Replay</button>`}</div>
      ${sides[side].map((turn, place) => html`<div key=${place}><article class="message user"><pre>${turn.user}</pre></article>
        <div class="samples">${turn.samples.map((sample, at) => html`<article key=${at} class=${`message assistant ${turn.samples.length > 1 && at === turn.chosen ? "chosen" : ""}`}>
          ${turn.samples.length > 1 && html`<button class="small" aria-pressed=${at === turn.chosen} onClick=${() => choose(side, place, at)}>${at === turn.chosen ? "goes on from this" : "go on from this"}</button>`}
          <${Tokens} sample=${sample} /></article>`)}</div></div>`)}
      ${busy && target && html`<p class="muted">samples …</p>`}</section>`)}</div>
    <form class="bar say" onSubmit=${send}><label class="grow"><span class="skip">Message</span><textarea rows="2" aria-label="Message" placeholder="A message to both" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey) send(event); }}></textarea></label><button class="main" disabled=${busy || targets.every((one) => !one)}>Send</button></form>`;
}

/** A base model, or a run, one of its policies and one of its versions. */
function Target({ value, label, models, runs, onChange }) {
  const { run, job, policy, version } = partsOf(value, runs);
  const { data: view } = useData(run ? jobPath(job) : null), policies = Object.keys(view?.spec.policies ?? {});
  const shown = policy || policies[0];
  const { data: versions } = useData(shown ? `${jobPath(job, "policies", encodeURIComponent(shown), "versions")}?limit=1000` : null);
  return html`<select aria-label=${label} value=${job} onChange=${(event) => onChange(event.target.value)}><option value="">nothing</option>
      <optgroup label="Base models">${models.map((one) => html`<option value=${one.name}>${one.name}</option>`)}</optgroup>
      <optgroup label="Runs">${runs.map((one) => html`<option value=${one.id}>${one.name} (${one.step} steps)</option>`)}</optgroup></select>
    ${policies.length > 1 && html`<select aria-label=${`${label}: policy`} value=${shown} onChange=${(event) => onChange(targetOf(job, event.target.value, ""))}>${policies.map((name) => html`<option value=${name}>${name}</option>`)}</select>`}
    ${run && html`<select aria-label=${`${label}: version`} value=${version} onChange=${(event) => onChange(targetOf(job, policy, event.target.value))}><option value="">newest version</option>
      ${(versions ?? []).filter((one) => one.kept).reverse().map((one) => html`<option value=${one.version}>version ${one.version}, step ${one.step}</option>`)}</select>`}`;
}

function Tokens({ sample }) {
  if (sample.tokens.length === 0) return html`<pre>${sample.text || html`<span class="muted">(empty)</span>`}</pre>`;
  return html`<pre class="tokens">${sample.tokens.map((one, at) => html`<span key=${at} class=${`token lp${surprise(one.logprob)}`} title=${`${number(one.logprob, 4)} nats`}>${one.token}</span>`)}</pre>${sample.finish === "length" && html`<span class="muted small">cut at its longest</span>`}`;
}
