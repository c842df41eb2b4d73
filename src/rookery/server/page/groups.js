// The groups of a step, their rewards, and the answers of one prompt side by side.
import { useEffect, useState } from "preact/hooks";
import { jobPath, useData } from "./api.js";
import { ago, counted, histogram, inBin, isNumber, number, recounted, reward, route, steps, time } from "./format.js";
import { colored } from "./jobform.js";
import { Badge, Empty, Facts, Loading, Pager, Problem, Scroll, html, signed } from "./parts.js";
import { asText, reach, segments, shorten } from "./text.js";

const PAGE = 50;
export const REFRESH = 3000; // ms, while a group or an episode runs
const BAR = 90; // height of the histogram in pixels

/** The text of a message, whose content may be in parts. */
const content = (value) => (Array.isArray(value) ? value.map((part) => (typeof part?.text === "string" ? part.text : asText(part))).join("") : asText(value));

const sameBin = (a, b) => a !== null && a.from === b.from && a.to === b.to;

export const prompts = (prompt) => {
  if (prompt === null) return "–";
  if (prompt && typeof prompt === "object") {
    for (const name of ["prompt", "question", "text"]) if (typeof prompt[name] === "string") return prompt[name];
    if (Array.isArray(prompt.messages)) return prompt.messages.map((one) => content(one?.content ?? one)).join("\n");
  }
  return asText(prompt);
};

/** Whose reward that of an episode is, where several policies have one: the first that trains. */
export function ofPolicy(view) {
  const names = Object.keys(view.spec.policies);
  return names.length > 1 ? ` of ${names.find((name) => view.spec.policies[name].train !== false) ?? names[0]}` : "";
}

/** Why there are no groups or episodes of a run: those of older finished runs are deleted. */
export const noneOf = (thing, view) => (!view.finished ? `No ${thing} yet.` : view.counters.episodes ? `The ${thing}s of this run are not kept any more; its metrics and versions are.` : `This run had no ${thing}.`);

/** The version that trained on a group or an episode; of each policy, where several train. */
export function trainedInto({ uses, consumed_by }) {
  return Object.entries(uses).map(([name, version]) => `${version} of ${name}`).join(", ") || consumed_by;
}

/** A bar for each bin; a click on one keeps the episodes between its bounds, as `bin`. */
export function Histogram({ bins, rewards, bin, onBin, whose = "" }) {
  const most = Math.max(1, ...bins.map((one) => one.count));
  if (bins.length === 0) return null;
  return html`<div class="panel histogram"><h2 class="sub">Rewards${whose} <span class="unit muted small">${counted(rewards.length, "episode")}; choose a bar to see its groups</span></h2>
    <div class="bars">${bins.map((one, at) => {
      const from = number(one.from, 2), to = number(one.to, 2), name = one.from === one.to ? from : `${from} to ${to}`;
      return html`<button key=${at} aria-pressed=${sameBin(bin, one)} onClick=${() => onBin(sameBin(bin, one) ? null : one)} aria-label=${`${counted(one.count, "episode")} with a reward of ${name}`} title=${name} disabled=${one.count === 0 && !sameBin(bin, one)}>
        <span class="small">${one.count || ""}</span><svg width="100%" height=${BAR * (one.count / most) + 1} aria-hidden="true"><rect width="100%" height="100%" /></svg><span class="small muted">${from}</span></button>`;
    })}</div></div>`;
}

export function Steps({ job, view, path, rows }) {
  const step = path[2] === "step" ? Number(path[3]) : null;
  const [place, setPlace] = useState({}), [flat, setFlat] = useState(false);
  const { offset = 0, bin = null, among = [] } = place.step === step ? place : {}; // a page and a bar, among which it was chosen, belong to one step
  const setOffset = (to) => setPlace({ step, offset: to }), setBin = (to) => setPlace({ step, offset, bin: to, among: bins });
  const wanted = new URLSearchParams({ offset, limit: PAGE });
  if (step !== null) wanted.set("step", step);
  const { data, error } = useData(`${jobPath(job, "groups")}?${wanted}`, step === null ? 5000 : 0);
  if (!data) return html`<${Loading} error=${error} />`;
  const members = data.groups.flatMap((group) => group.members), rewards = members.map((one) => one.reward).filter(isNumber);
  const bins = bin ? recounted(among, rewards) : histogram(rewards), pressed = bins.find((one) => sameBin(bin, one)), inside = (group) => !pressed || group.members.some((one) => inBin(one.reward, pressed, pressed === bins.at(-1)));
  const shown = data.groups.filter((group) => inside(group) && (!flat || !group.zero_variance));
  const row = step === null ? null : rows.find((one) => one.step === step), known = rows.map((one) => one.step);
  const same = row ? rows.filter((one) => one.version === row.version && one.policy === row.policy).map((one) => one.step) : []; // one version may hold several steps, with the groups of all of them
  const flats = data.groups.filter((group) => group.zero_variance).length;
  const other = (by, label) => { const at = known.indexOf(by < 0 ? same[0] : same.at(-1)), to = at < 0 ? undefined : known[at + by]; return to !== undefined && html`<a class="button" href=${route(["run", job, "step", String(to)])}>${label}</a>`; };
  return html`
    <div class="bar"><h2>${step === null ? "Newest groups" : `Groups of ${same.length > 1 ? `steps ${same[0]} to ${same.at(-1)}` : `step ${step}`}`}</h2>
      ${step !== null && html`${other(-1, "← earlier step")}${other(1, "later step →")}`}
      ${flats > 0 && html`<label><input type="checkbox" checked=${flat} onChange=${() => setFlat(!flat)} /> hide ${flats} without variance${ofPolicy(view)}</label>`}
      <span class="muted right">${counted(data.total, "group")}</span></div>
    ${same.length > 1 && html`<p class="muted small">Version ${row.version} holds ${same.length} steps (checkpoints.commit_every). Its groups are listed together; the figures are those of step ${step}.</p>`}
    ${row && html`<${Facts} facts=${[["policy", row.policy ?? ""], ["reward", reward(row.reward)], ["spread of rewards", number(row.reward_std)], ["version", String(data.version)], ["staleness", steps(row.staleness_mean)], ["reply length", `${number(row.length_mean, 1)} tokens`], ["committed", time(row.time)]]} />`}
    ${data.total === 0 ? html`<${Empty}>${step === null || view.finished ? noneOf("group", view) : "The groups of this step are not kept, or the step is not committed."}<//>` : html`
    <${Histogram} bins=${bins} rewards=${rewards} bin=${bin} onBin=${setBin} whose=${ofPolicy(view)} />
    <${Scroll} label="Groups"><table><thead><tr><th class="number">Group</th><th>Prompt</th><th>State</th><th>Rewards${ofPolicy(view)}</th><th class="number">Mean</th><th>Variance${ofPolicy(view)}</th><th class="number">Oldest version${ofPolicy(view)}</th><th>Ended</th></tr></thead>
      <tbody>${shown.map((group) => {
        const values = group.members.map((one) => one.reward).filter(isNumber);
        return html`<tr key=${group.group}><td class="number"><a href=${route(["run", job, "group", group.group])}>${group.ordinal}</a></td>
          <td class="wrap"><a class="plain" href=${route(["run", job, "group", group.group])}>${shorten(prompts(group.prompt), 110)}</a></td><td class="flow"><${Badge} state=${group.state} />${group.reason && html` <span class="small muted">${shorten(group.reason, 40)}</span>`}</td>
          <td><${Dots} members=${group.members} /></td><td class="number">${values.length ? reward(values.reduce((sum, one) => sum + one, 0) / values.length) : "–"}</td>
          <td>${group.zero_variance ? html`<span class="warn small">none: no gradient</span>` : values.length > 1 ? html`<span class="small muted">${reward(Math.max(...values) - Math.min(...values))} apart</span>` : "–"}</td>
          <td class="number">${group.min_version ?? "–"}</td><td class="small">${group.finished ? `${ago(group.finished)} ago` : "runs"}</td></tr>`;
      })}</tbody></table><//>
    <${Pager} offset=${offset} size=${PAGE} total=${data.total} onOffset=${setOffset} />`}`;
}

const WIDEST = 180, BAR_WIDTH = 9; // pixels of the rewards of a group, and of each where they are few

/** The rewards of a group at a glance: a bar for each member, its height between the group's extremes. */
function Dots({ members }) {
  const step = Math.min(BAR_WIDTH, WIDEST / members.length);
  const values = members.map((one) => one.reward).filter(isNumber), low = Math.min(0, ...values), high = Math.max(1e-9, ...values);
  const label = members.map((one) => (isNumber(one.reward) ? number(one.reward, 2) : one.state)).join(", ");
  return html`<svg class="dots" width=${members.length * step} height="24" role="img" aria-label=${`rewards ${label}`}>${members.map((one, at) => {
    const size = isNumber(one.reward) ? 2 + (20 * (one.reward - low)) / (high - low || 1) : 3;
    return html`<rect x=${at * step} y=${24 - size} width=${0.78 * step} height=${size} class=${one.state === "failed" ? "failed" : ""} />`;
  })}</svg>`;
}

export function Group({ job, view, path }) {
  const name = path[3], [running, setRunning] = useState(false);
  const { data, error } = useData(jobPath(job, "groups", encodeURIComponent(name)), running ? REFRESH : 0);
  useEffect(() => setRunning(data?.state === "open"), [data]);
  if (!data) return html`<${Loading} error=${error} />`;
  return html`
    <div class="bar"><h2>Group ${data.ordinal}</h2><${Badge} state=${data.state} />
      ${data.zero_variance && html`<span class="badge warn">no variance of rewards${ofPolicy(view)}: no gradient</span>`}
      ${data.consumed_by !== null && html`<span class="muted small">trained into version ${trainedInto(data)}</span>`}</div>
    ${data.reason && html`<div class="notice warn">${data.reason}</div>`}
    <section class="panel"><h2 class="sub">Prompt</h2><pre>${prompts(data.prompt)}</pre></section>
    <h2>${data.members.length} answers${ofPolicy(view) && html` <span class="unit muted small">reward and advantage${ofPolicy(view)}</span>`}</h2>
    <div class="answers">${data.members.map((one) => html`<${Answer} key=${one.episode} job=${job} one=${one} policies=${colored(view.spec)} />`)}</div>`;
}

export function Answer({ job, one, policies = [] }) {
  return html`<article class="panel answer">
    <div class="bar"><a href=${route(["run", job, "episode", one.episode])}>Answer ${one.member + 1}</a>
      ${one.state === "failed" ? html`<${Badge} state="failed" />` : html`<b>${reward(one.reward)}</b>`}
      ${isNumber(one.advantage) && html`<span class=${one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : "muted"}>advantage ${signed(one.advantage, 2)}</span>`}
      <span class="muted small right">${counted(one.tokens, "token")}${one.finish && one.finish !== "done" ? `, ended by ${one.finish.replace("_", " ")}` : ""}${one.version !== null ? `, version ${one.version}` : ""}</span></div>
    ${one.error && html`<pre class="bad" tabindex=${reach(one.error)}>${one.error}</pre>`}
    ${one.replies?.length ? one.replies.map((reply, at) => html`${one.speakers?.length > 0 && html`<p class="small speaker" key=${`by ${at}`}><i class=${`swatch s${policies.indexOf(one.speakers[at]) % 6}`}></i>${one.speakers[at]}</p>`}<${Reply} key=${at} text=${reply} />`) : !one.error && html`<p class="muted">Its text is not kept any more.</p>`}
    ${one.metrics && Object.keys(one.metrics).length > 0 && html`<p class="small muted metrics">${Object.entries(one.metrics).map(([name, value]) => `${name} ${number(value)}`).join(" · ")}</p>`}
  </article>`;
}

/** A reply: reasoning folded, tool calls set apart. */
export const Reply = ({ text }) => html`${segments(text).map((one, at) => one.kind === "think"
  ? html`<details key=${at} class="think"><summary>reasoning, ${counted(one.text.length, "character")}</summary><pre tabindex=${reach(one.text)}>${one.text}</pre></details>`
  : html`<pre key=${at} class=${one.kind === "tool" ? "tool" : ""} tabindex=${reach(one.text)}>${one.text || html`<span class="muted">(empty)</span>`}</pre>`)}`;
