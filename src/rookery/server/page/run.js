// One run: its header, its tabs, and the overview with the charts.
import { useState } from "preact/hooks";
import { getAll, jobPath, temporary, useData, useMetrics } from "./api.js";
import { Actions } from "./actions.js";
import { Axis, Chart } from "./chart.js";
import { ago, count, duration, isNumber, number, percent, reward, route, steps, time } from "./format.js";
import { chartsOf } from "./overview.js";
import { Evaluations } from "./evaluations.js";
import { Episode } from "./episode.js";
import { Episodes } from "./episodes.js";
import { Events } from "./events.js";
import { Health } from "./health.js";
import { Group, Steps, ofPolicy } from "./groups.js";
import { Timeline } from "./timeline.js";
import { Badge, Empty, Facts, Loading, Problem, Scroll, Unread, html, useTitle } from "./parts.js";

const STEPS_SHOWN = 12;

/** The policies of a run that has several, each with the version that it replies with and the figures of its newest step. */
function policiesOf(view) {
  const names = Object.keys(view.spec.policies), known = new Map(view.policies.map((one) => [one.name, one]));
  if (names.length < 2) return [];
  return names.map((name) => {
    const one = known.get(name);
    if (!one) return [`policy ${name}`, "the base model"];
    if (one.follows) return [`policy ${name}`, `version ${one.version} of ${one.follows}`];
    const figures = [["reward", reward(one.reward)], ["loss", number(one.loss)], ["staleness", steps(one.staleness)]].filter(([figure]) => isNumber(one[figure]));
    return [`policy ${name}`, [`version ${one.version}${view.spec.policies[name].train === false ? ", frozen" : ""}`, ...figures.map((pair) => pair.join(" "))].join(" · ")];
  });
}

const TABS = [["", "Overview"], ["steps", "Groups"], ["episodes", "Episodes"], ["timeline", "Timeline"], ["events", "Events"]];
const INSIDE = { steps: Steps, step: Steps, group: Group, episode: Episode, episodes: Episodes, timeline: RunTimeline, events: Events };

/** Whether a run trains on rows, without replies: it has neither groups nor episodes. */
const onRows = (view) => ["sft", "dpo"].includes(view.spec.algorithm?.name);

/** How a paused run continues, by who paused it. */
const THEN = { outage: "It resumes by itself.", owner: "Resume continues it.", fault: "When that is corrected, Resume continues it." };

/** How many episodes ended, with a link to those that failed. */
function episodesOf({ counters }, job) {
  const ended = counters.episodes ?? 0, failed = counters.episodes_failed ?? 0;
  if (!ended && !failed) return "";
  return failed ? html`${count(ended)}, <a href=${route(["run", job, "episodes"], { failed: "true" })}>${count(failed)} failed</a>` : count(ended);
}

export function Run({ path, query, account }) {
  const [, job, tab = ""] = path;
  const stream = useMetrics(job);
  const { data: view, error, since, reload } = useData(jobPath(job), stream.live || stream.since || !stream.job ? 3000 : 15000);
  useTitle(view ? `${view.name}${view.state === "completed" ? "" : ` (${view.state})`}, ${(TABS.find(([name]) => name === tab)?.[1] ?? tab).toLowerCase()} ${path[2] === "step" ? path[3] : ""}`.trim() : "Run");
  if (!view) return html`<${Unread} title="Run" error=${error} />`;
  const Inside = Object.hasOwn(INSIDE, tab) ? INSIDE[tab] : null, tabs = TABS.filter(([name]) => !onRows(view) || !["steps", "episodes"].includes(name));
  return html`
    <div class="bar"><h1>${view.name}</h1><span role="status"><${Badge} state=${view.state} /></span>
      ${stream.live && view.state === "running" && html`<span class="good small">● live</span>`}
      <span class="muted small">${view.id}</span></div>
    ${error ? html`<div class="notice warn" role="status">${error.status === 404 ? "This run is deleted" : temporary(error) ? `No answer since ${time(since)}: ${error.message}` : `Refused since ${time(since)}: ${error.message}`}. The figures below are from before.</div>`
      : stream.since && html`<div class="notice warn" role="status">The charts have had no connection since ${time(stream.since)}${stream.error ? `: ${stream.error.message}` : ""}. The page tries again.</div>`}
    ${view.reason && view.state !== "completed" && html`<div class=${`notice ${view.state === "failed" ? "bad" : "warn"}`}><b>${view.state}</b>: ${view.reason}. ${view.state === "paused" && THEN[view.paused_by]}</div>`}
    <${Facts} facts=${[
      account.role === "admin" ? ["tenant", view.tenant] : ["", ""],
      ["base model", view.base_model],
      ["step", view.steps ? `${count(view.step)} of ${count(view.steps)}` : count(view.step)],
      [`reward${ofPolicy(view)}`, reward(view.reward)],
      ["tokens/s", view.state === "running" && !onRows(view) ? number(view.tokens_per_second, 1) : ""],
      ["tokens sampled", onRows(view) ? "" : count(view.tokens)],
      ["waits for", view.finished ? "" : view.waits_for],
      ["episodes", episodesOf(view, job)],
      ["cost", view.cost.cost ? number(view.cost.cost) : ""],
      ["compute", view.cost.seconds ? duration(view.cost.seconds) : ""],
      ["submitted", time(view.created)],
      view.finished ? ["took", duration(view.finished - (view.started || view.created))] : ["began", view.started ? `${ago(view.started)} ago` : ""],
    ]} />
    <${Facts} facts=${policiesOf(view)} />
    <${Actions} job=${job} view=${view} account=${account} reload=${reload} />
    <nav class="tabs" aria-label="Parts of the run">${tabs.map(([name, label]) => html`<a href=${route(["run", job, ...(name ? [name] : [])])} aria-current=${(tab === name || (name === "steps" && ["step", "group", "episode"].includes(tab))) ? "page" : undefined}>${label}</a>`)}</nav>
    ${Inside ? html`<${Inside} job=${job} view=${view} rows=${stream.rows} path=${path} query=${query} account=${account} />` : html`<${Overview} job=${job} view=${view} stream=${stream} />`}`;
}

function RunTimeline({ job, view, account }) {
  return html`<${Timeline} path=${jobPath(job, "timeline")} trace=${jobPath(job, "trace")} account=${account} job=${job} first=${view.finished && view.started ? { start: view.started, end: view.finished + 1 } : null} names=${{ [view.id]: view.name }} />`;
}

/** The meaning of each chart that has one. */
const Meaning = ({ charts }) => html`<details class="meaning small"><summary>Meaning of the charts</summary><dl>${charts.filter((chart) => chart.about).map((chart) => html`<dt key=${chart.title}>${chart.title}</dt><dd>${chart.about}</dd>`)}</dl></details>`;

function Overview({ job, view, stream }) {
  const [weight, setWeight] = useState(0), [zoom, setZoom] = useState(null);
  const { data: evaluations, error: unread } = useData(`${jobPath(job, "evaluations")}?held_out=false&limit=1000`, view.finished ? 0 : 10000, getAll);
  const rows = stream.rows, steps = rows.map((row) => row.step);
  if (!stream.loaded) return html`<${Loading} />`;
  const health = html`<${Health} job=${job} view=${view} /><${Problem} error=${evaluations ? null : unread} />`; // a run without a step may be the one with alarms
  if (rows.length === 0) return html`${health}<${Problem} error=${stream.error} /><${Empty}>${view.finished ? "No step was committed." : "No step is committed yet."} ${view.waits_for && `The run waits for: ${view.waits_for}.`}<//>`;
  const charts = chartsOf(rows, evaluations ?? [], Object.keys(view.spec.policies));
  const rowsOnly = onRows(view), open = (step) => { if (step !== undefined && !rowsOnly) location.hash = route(["run", job, "step", String(step)]); };
  const draw = (chart) => html`<${Chart} key=${chart.title} ...${chart} steps=${steps} weight=${weight} zoom=${zoom} onZoom=${setZoom} onStep=${open} />`;
  const newest = rows.filter((row) => !zoom || (row.step >= zoom[0] && row.step <= zoom[1])).slice(-STEPS_SHOWN).reverse(); // of the steps that the charts show
  const environment = charts.filter((chart) => chart.environment), several = rows.some((row) => row.policy); // where several train
  return html`
    ${health}
    <div class="bar"><${Axis} steps=${steps} weight=${weight} onWeight=${setWeight} zoom=${zoom} onZoom=${setZoom} />
      <span class="muted small right mouse">drag to zoom, double-click to show all${rowsOnly ? "" : ", click to open a step"}</span>${!rowsOnly && html`<span class="muted small touch">touch a step to open it</span>`}</div>
    <${Meaning} charts=${charts} />
    <div class="charts">${charts.filter((chart) => !chart.environment).map(draw)}</div>
    ${environment.length > 0 && html`<h2>Metrics of the environment</h2><div class="charts">${environment.map(draw)}</div>`}
    <${Evaluations} evaluations=${evaluations ?? []} order=${Object.keys(view.spec.policies)} />
    <h2>${zoom ? "Last steps shown" : "Newest steps"}</h2>
    ${rowsOnly ? html`<${Scroll} label="Newest steps"><table><thead><tr><th class="number">Step</th>${several && html`<th>Policy</th>`}<th class="number">Version</th><th class="number">Loss</th><th class="number">Rows</th><th class="number">Tokens learned</th><th class="number">Length, tokens</th><th class="number">Training</th><th>Committed</th></tr></thead>
      <tbody>${newest.map((row) => html`<tr key=${row.step}><td class="number">${row.step}</td>${several && html`<td class="wrap narrow">${row.policy}</td>`}<td class="number">${row.version}</td><td class="number">${number(row.loss)}</td><td class="number">${count(row.rows)}</td><td class="number">${count(row.tokens)}</td>
        <td class="number">${number(row.length_mean, 1)}</td><td class="number">${duration(row["seconds/train"])}</td><td class="small">${time(row.time)}</td></tr>`)}</tbody></table><//>` : html`<${Scroll} label="Newest steps"><table><thead><tr><th class="number">Step</th>${several && html`<th>Policy</th>`}<th class="number">Version</th><th class="number">Reward</th><th class="number">Spread</th>
      <th class="number">Episodes</th><th class="number">No variance</th><th class="number">Length, tokens</th><th class="number">Staleness</th><th class="number">Generation</th><th class="number">Training</th><th>Committed</th></tr></thead>
      <tbody>${newest.map((row) => html`<tr key=${row.step}>
        <td class="number"><a href=${route(["run", job, "step", String(row.step)])}>${row.step}</a></td>${several && html`<td class="wrap narrow">${row.policy}</td>`}<td class="number">${row.version}</td><td class="number">${reward(row.reward)}</td><td class="number">${number(row.reward_std)}</td>
        <td class="number">${count(row.episodes)}</td><td class="number">${percent(row.zero_variance_share)}</td><td class="number">${number(row.length_mean, 1)}</td><td class="number">${number(row.staleness_mean, 2)}</td>
        <td class="number">${duration(row["seconds/generation"])}</td><td class="number">${duration(row["seconds/train"])}</td><td class="small">${time(row.time)}</td></tr>`)}</tbody></table><//>`}`;
}
