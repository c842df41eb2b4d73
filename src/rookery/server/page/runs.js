// All runs: their state at a glance, filtered and sorted by the service, up to four chosen for comparison.
import { useEffect, useState } from "preact/hooks";
import { useData } from "./api.js";
import { ago, count, counted, listed, number, parseRoute, reward, route, time } from "./format.js";
import { Badge, Empty, Loading, Pager, Problem, Progress, Scroll, Sparkline, html, useTyped } from "./parts.js";
import { shorten } from "./text.js";

const REFRESH = 2000; // ms: as fresh as a person notices
const PAGE = 50;
export const COMPARED = 4;
const STATES = ["queued", "running", "paused", "completed", "failed", "cancelled"];
const SORTED = { created: "Submitted", name: "Run", state: "State", step: "Step", reward: "Reward" };

export function Runs({ query, account }) {
  const [chosen, setChosen] = useState([]), [text, type, choose] = useTyped(query.text ?? "");
  const order = query.order ?? "created", descending = query.descending !== "false", offset = Number(query.offset ?? 0);
  const to = (change) => route(["runs"], { ...parseRoute(location.hash).query, offset: "", ...change }), go = (change) => { location.hash = to(change); }; // of the address now: two choices may come before this is drawn again
  useEffect(() => {
    if (text === (query.text ?? "")) return undefined;
    const timer = setTimeout(() => { choose(text); location.replace(to({ text })); }, 300); // the way back passes no half of a word
    return () => clearTimeout(timer);
  }, [text, location.hash]);
  const wanted = new URLSearchParams({ order, descending, offset, limit: PAGE, text: query.text ?? "" });
  if (query.state) wanted.append("state", query.state);
  const { data, error } = useData(`/api/v1/runs?${wanted}`, REFRESH);
  const head = (by, number = false) => html`<th class=${number ? "number" : ""} aria-sort=${order === by ? (descending ? "descending" : "ascending") : undefined}>
    <button data-sorted=${order === by ? "" : undefined} onClick=${() => go({ order: by, descending: order === by ? !descending : by !== "name" })}>
      ${SORTED[by]}${order === by ? (descending ? " ↓" : " ↑") : ""}</button></th>`;
  const toggle = (id) => setChosen((now) => (now.includes(id) ? now.filter((one) => one !== id) : [...now, id].slice(-COMPARED)));
  const filtered = query.text || query.state;
  return html`
    <div class="bar"><h1>Runs</h1>
      <input type="search" placeholder="Name or id" aria-label="Filter by name or id" value=${text} onInput=${(event) => type(event.target.value)} />
      <select aria-label="Filter by state" value=${query.state ?? ""} onChange=${(event) => go({ state: event.target.value })}>
        <option value="">any state</option>${listed(STATES, query.state).map((state) => html`<option value=${state}>${state}</option>`)}
      </select>
      ${chosen.length > 0 && html`<a class="button" href=${route(["compare", ...chosen])}>Compare ${counted(chosen.length, "run")}</a>
        <button onClick=${() => setChosen([])}>Clear</button>`}
      ${data && html`<span class="muted right">${counted(data.total, "run")}</span>`}
    </div>
    ${data ? html`<${Problem} error=${error} />` : html`<${Loading} error=${error} />`}
    ${data && data.total === 0 && html`<${Empty}>${filtered ? "No run is like that." : html`No runs yet. <a href="#/new">New run</a> or <code>rookery run job.yaml</code> submits one.`}<//>`}
    ${data && data.total > 0 && html`<${Scroll} label="Runs"><table><thead><tr>
        <th>Compare</th>${head("name")}${account.role === "admin" && html`<th>Tenant</th>`}${head("state")}${head("step", true)}${head("reward", true)}
        <th class="number">Tokens/s</th><th class="number">Staleness</th><th class="wrap">Waits for, or why it ended</th><th class="number">Cost</th>${head("created")}
      </tr></thead><tbody>${data.runs.map((run) => html`<${Row} key=${run.id} run=${run} tenant=${account.role === "admin"} chosen=${chosen.includes(run.id)} onToggle=${() => toggle(run.id)} />`)}</tbody></table><//>
      <${Pager} offset=${offset} size=${PAGE} total=${data.total} newestFirst=${order === "created" && descending} onOffset=${(to) => go({ offset: to })} />`}`;
}

function Row({ run, tenant, chosen, onToggle }) {
  const ended = run.finished > 0;
  const waits = ended ? run.reason : run.state === "paused" ? run.reason : run.waits_for;
  const where = run.state === "queued" || run.state === "paused" ? `for ${ago(run.since)}` : "";
  return html`<tr>
    <td><input type="checkbox" checked=${chosen} onChange=${onToggle} aria-label=${`Compare ${run.name}`} /></td>
    <td class="wrap run"><a href=${route(["run", run.id])}>${run.name}</a><div class="muted small">${run.base_model}</div></td>
    ${tenant && html`<td class="wrap narrow">${run.tenant}</td>`}
    <td><${Badge} state=${run.state} /></td>
    <td class="number flow">${count(run.step)}${run.steps ? ` / ${count(run.steps)}` : ""} <${Progress} done=${run.step} all=${run.steps} /></td>
    <td class="number flow">${reward(run.reward)} ${run.policy && html`<span class="muted small">${run.policy}</span> `}<${Sparkline} values=${run.rewards.length > 1 ? run.rewards : []} /></td>
    <td class="number">${ended || !run.tokens_per_second ? "–" : number(run.tokens_per_second, 1)}</td>
    <td class="number">${number(run.staleness, 2)}</td>
    <td class="wrap small" title=${waits || undefined}>${waits ? shorten(waits) : where ? "" : "–"} <span class="muted">${where}</span></td>
    <td class="number">${run.cost.cost ? number(run.cost.cost, 3) : "–"}</td>
    <td class="small wrap narrow" title=${time(run.created)}>${ago(run.created)} ago</td>
  </tr>`;
}
