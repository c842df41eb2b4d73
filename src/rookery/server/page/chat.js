// Two models side by side: the base next to a version, or two versions, with the same messages.
import { useEffect, useState } from "preact/hooks";
import { call, getAll, jobPath, useData } from "./api.js";
import { counted, listed, number } from "./format.js";
import { Empty, Loading, Problem, html } from "./parts.js";
import { Walk } from "./tokens.js";
import { partsOf, surprise, targetOf } from "./text.js";

const SAMPLES = 8; // at once: what fits next to each other

/** The replies of `model` to a conversation, with the log-probability of each token. A field that was emptied is left to the service. */
async function ask(model, messages, { n, temperature, maxTokens, seed, system }, signal) {
  const given = Object.entries({ n, temperature, max_tokens: maxTokens, seed }).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]);
  const opened = system.trim() ? [{ role: "system", content: system }] : [];
  const answer = await call("POST", "/v1/chat/completions", { model, messages: [...opened, ...messages], logprobs: true, ...Object.fromEntries(given) }, { signal });
  return answer.choices.map((one) => ({ text: one.message.content, finish: one.finish_reason, tokens: one.logprobs?.content ?? [] }));
}

/** The messages before and with a turn, as one side has them: its own replies, the chosen sample of each turn. */
export const history = (turns, last) => turns.slice(0, last + 1).flatMap((turn, at) => [{ role: "user", content: turn.user }, ...(at < last ? [{ role: "assistant", content: turn.samples[turn.chosen]?.text ?? "" }] : [])]);

export function Chat({ query, account }) {
  const asked = (query.target ?? "").split(/[/@]/)[0], given = query.target ?? "";
  const { data: models, error: noModels } = useData("/api/v1/models"), { data: newest, error: noRuns } = useData("/api/v1/runs?limit=200"), { data: one, error: notOne } = useData(asked ? `/api/v1/runs?${new URLSearchParams({ id: asked })}` : null);
  const unread = noModels ?? noRuns ?? notOne;
  const runs = newest && (one || !asked) ? [...newest.runs, ...(one?.runs ?? []).filter((run) => newest.runs.every((other) => other.id !== run.id))] : null;
  const [targets, setTargets] = useState([null, given]), [sides, setSides] = useState([[], []]);
  const [options, setOptions] = useState({ n: 1, temperature: 1, maxTokens: 128, seed: "", system: "" }), [text, setText] = useState(""), [busy, setBusy] = useState(null), [error, setError] = useState(null); // busy: what ends the requests
  const usable = (models ?? []).filter((one) => one.state === "loaded"), mine = (runs ?? []).filter((run) => run.tenant === account.name && run.step > 0);
  useEffect(() => {
    if (usable.length && runs) setTargets((now) => (now[0] !== null ? now : [mine.find((run) => now[1].startsWith(run.id))?.base_model ?? usable[0].name, now[1]]));
  }, [models, newest, one]);
  const show = (side, turns) => setSides((old) => old.map((one, at) => (at === side ? turns : one)));
  /** Samples the replies to messages after the turns that are there; without one, what was there before stays. */
  const play = async (side, before, users, signal) => {
    const kept = sides[side];
    let turns = before;
    try {
      for (const user of users) {
        show(side, [...turns, { user, samples: [], chosen: 0 }]);
        const asked = [...turns, { user, samples: [], chosen: 0 }];
        turns = [...turns, { user, samples: await ask(targets[side], history(asked, turns.length), options, signal), chosen: 0 }];
      }
      show(side, turns);
    } catch (problem) {
      show(side, turns.length > before.length ? turns : kept);
      throw problem;
    }
  };
  const run = async (work) => {
    const stop = new AbortController();
    setBusy(stop);
    setError(null);
    const failed = (await Promise.allSettled(work(stop.signal))).find((one) => one.status === "rejected");
    if (failed && !stop.signal.aborted) setError(failed.reason);
    setBusy(null);
    return !failed;
  };
  const send = async (event) => {
    event.preventDefault();
    const user = text.trim();
    if (!user || busy || targets.every((one) => !one)) return;
    setText("");
    const done = await run((signal) => targets.flatMap((target, side) => (target ? [play(side, sides[side], [user], signal)] : [])));
    if (!done) setText((now) => now || text); // to be sent again
  };
  const replay = (side) => run((signal) => [play(side, [], (sides[side].length ? sides[side] : sides[1 - side]).map((turn) => turn.user), signal)]);
  const choose = (side, turn, chosen) => setSides((old) => old.map((one, at) => (at === side ? one.map((given, place) => (place === turn ? { ...given, chosen } : given)) : one)));
  const give = (name, value) => setOptions((now) => ({ ...now, [name]: value }));
  const option = (name, label, more) => html`<label>${label} <input class="short" type="number" value=${options[name]} ...${more} onInput=${(event) => give(name, event.target.value)} /></label>`;
  const users = sides.some((turns) => turns.length > 0);
  return html`<div class="bar"><h1>Chat</h1>${option("n", "samples", { min: 1, max: SAMPLES })}${option("temperature", "temperature", { min: 0, max: 10, step: 0.1 })}${option("maxTokens", "longest reply, tokens", { min: 1 })}${option("seed", "seed", { min: 0, placeholder: "any" })}
      ${users && html`<button class="right" disabled=${busy} onClick=${() => setSides([[], []])}>New conversation</button>`}</div>
    <details class="part system" open=${options.system !== ""}><summary>System message ${options.system === "" && html`<span class="muted">the model's default</span>`}</summary><textarea rows="2" aria-label="System message" value=${options.system} onInput=${(event) => give("system", event.target.value)}></textarea></details>
    <${Problem} error=${error ?? unread} />
    ${(!models || !runs) && !unread && html`<${Loading} />`}
    ${models && usable.length === 0 && html`<${Empty}>No base model is loaded yet: chat needs a worker.<//>`}
    <div class="two">${targets.map((target, side) => html`<section key=${side} class="panel side" aria-label=${side ? "Right" : "Left"}>
      <div class="bar"><${Target} value=${target ?? ""} label=${side ? "Model on the right" : "Model on the left"} models=${usable} runs=${mine} onChange=${(value) => setTargets((now) => now.map((one, at) => (at === side ? value : one)))} />
        ${users && target && html`<button onClick=${() => replay(side)} disabled=${busy} title="Sends the same messages to this model again and shows its new replies">Replay</button>`}</div>
      ${sides[side].map((turn, place) => html`<div key=${place}><article class="message user"><pre>${turn.user}</pre></article>
        ${turn.samples.length === 0 && html`<p class="muted small" role="status">sampling …</p>`}<div class="samples">${turn.samples.map((sample, at) => html`<article key=${at} class=${`message assistant ${turn.samples.length > 1 && at === turn.chosen ? "chosen" : ""}`}>
          ${turn.samples.length > 1 && html`<button class="small" aria-pressed=${at === turn.chosen} onClick=${() => choose(side, place, at)}>${at === turn.chosen ? "goes on from this" : "go on from this"}</button>`}
          <${Tokens} sample=${sample} /></article>`)}</div></div>`)}
      ${!users && html`<p class="muted small">${target ? "Its replies stand here, each token with its log-probability." : "Choose a base model, or a version of a run."}</p>`}</section>`)}</div>
    ${users && html`<p class="muted small">The stronger the color of a token, the less likely it was; <span class="mouse">point at it, or use the arrow keys,</span><span class="touch">touch it</span> for its log-probability.</p>`}
    <form class="bar say" onSubmit=${send}><label class="grow"><span class="skip">Message</span><textarea rows="2" aria-label="Message" placeholder=${targets.every(Boolean) ? "A message to both" : "A message"} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea></label>${busy ? html`<button type="button" onClick=${() => busy.abort()}>Stop</button>` : html`<button class="main" disabled=${targets.every((one) => !one)}>Send</button>`}</form>`;
}

/** A base model, or a run, one of its policies and one of its versions. */
function Target({ value, label, models, runs, onChange }) {
  const { run, job, policy, version } = partsOf(value, runs);
  const { data: view, error: noView } = useData(run ? jobPath(job) : null), policies = Object.keys(view?.spec.policies ?? {});
  const shown = policy || policies[0], known = !job || models.some((one) => one.name === job) || runs.some((one) => one.id === job);
  const { data: versions, error: noVersions } = useData(shown ? `${jobPath(job, "policies", encodeURIComponent(shown), "versions")}?limit=1000` : null, 0, getAll);
  const steps = new Map((versions ?? []).filter((one) => one.kept).reverse().map((one) => [String(one.version), one.step]));
  return html`<select aria-label=${label} value=${job} onChange=${(event) => onChange(event.target.value)}><option value="">nothing</option>${!known && html`<option value=${job}>${job}</option>`}
      <optgroup label="Base models">${models.map((one) => html`<option value=${one.name}>${one.name}</option>`)}</optgroup>
      <optgroup label="Runs">${runs.map((one) => html`<option value=${one.id}>${one.name} (${counted(one.step, "step")})</option>`)}</optgroup></select>
    ${policies.length > 1 && html`<select aria-label=${`${label}: policy`} value=${shown} onChange=${(event) => onChange(targetOf(job, event.target.value, ""))}>${listed(policies, shown).map((name) => html`<option value=${name}>${name}</option>`)}</select>`}
    ${run && html`<select aria-label=${`${label}: version`} value=${version} onChange=${(event) => onChange(targetOf(job, policy, event.target.value))}><option value="">newest version</option>
      ${listed([...steps.keys()], version).map((one) => html`<option value=${one}>version ${one}${steps.has(one) ? `, step ${steps.get(one)}` : ""}</option>`)}</select>`}<${Problem} error=${noView ?? noVersions} />`;
}

function Tokens({ sample }) {
  if (sample.tokens.length === 0) return html`<pre>${sample.text || html`<span class="muted">(empty)</span>`}</pre>`;
  const spans = sample.tokens.map((one, at) => html`<span key=${at} data-at=${at} class=${`token lp${surprise(one.logprob)}`} title=${`${number(one.logprob, 4)} nats`}>${one.token}</span>`);
  const about = (at) => html`<b>${JSON.stringify(sample.tokens[at].token)}</b> log-probability ${number(sample.tokens[at].logprob, 4)} nats`;
  return html`<${Walk} spans=${spans} count=${sample.tokens.length} about=${about} />${sample.finish === "length" && html`<span class="muted small">cut at the longest reply</span>`}`;
}
