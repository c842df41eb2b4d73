// The workers: what each does, what it holds, what it costs, and what happened to it.
import { useState } from "preact/hooks";
import { useData } from "./api.js";
import { bytes, count, counted, duration, number, percent, time } from "./format.js";
import { Badge, Empty, Facts, Problem, Scroll, Unread, html } from "./parts.js";

const REFRESH = 2000, EVENTS = 40;
const LIFE = ["joined", "loaded", "catching up", "ready", "roles", "stalled", "failed", "draining", "suspect", "gone", "pull failed", "training moved"]; // not the work of every step, which would push them out

export function Fleet() {
  const { data: workers, error } = useData("/api/v1/workers", REFRESH), { data: health, error: noHealth } = useData("/api/v1/health", REFRESH);
  const { data: costs, error: noCosts } = useData("/api/v1/costs", 5 * REFRESH), [work, setWork] = useState(false);
  const { data: events, error: noEvents } = useData(`/api/v1/workers/events?${new URLSearchParams([["limit", EVENTS], ...(work ? [] : LIFE.map((kind) => ["event", kind]))])}`, REFRESH);
  if (!workers) return html`<${Unread} title="Fleet" error=${error} />`;
  const totals = health?.totals ?? {}, gauges = health?.gauges ?? {}, sites = workers.some((worker) => worker.site);
  return html`<div class="bar"><h1>Fleet</h1><span class="muted right">${counted(workers.length, "worker")}</span></div>
    <${Problem} error=${error ?? noHealth ?? noCosts ?? noEvents} />
    ${health && html`<${Facts} facts=${[["requests running", count(gauges.requests_running)], ["requests waiting", count(gauges.requests_waiting)], ["environment hosts", count(gauges.environment_hosts)]]} />
    <h2 class="sub">Since the service started</h2><${Facts} facts=${[
      ["tokens sampled", number(totals.sampled_tokens)], ["tokens trained", number(totals.trained_tokens)], ["steps", count(totals.steps)],
      ["requests moved", count(totals.requests_migrated)], ["tokens saved by moving", count(totals.migrated_tokens)], ["workers lost", count(totals.worker_losses)], ["training retries", count(totals.training_retries)],
    ]} />`}
    ${workers.length === 0 ? html`<${Empty}>No worker is connected. <code>rookery worker --connect …</code> starts one.<//>` : html`<${Scroll} label="Workers"><table><thead><tr><th>Worker</th>${sites && html`<th>Site</th>`}<th>State</th><th>Base model</th><th>Roles</th>
      <th class="number">Requests</th><th class="number">Memory</th><th>Parts of it</th><th>Notice</th></tr></thead>
      <tbody>${workers.map((worker) => html`<tr key=${worker.name}><td class="wrap narrow"><b>${worker.name}</b><div class="muted small">${[worker.host, worker.pid].filter(Boolean).join(" · ")}</div></td>${sites && html`<td class="wrap narrow">${worker.site || "–"}</td>`}
        <td><${Badge} state=${worker.state} /><div class="muted small">for ${duration(worker.seconds)}</div></td><td class="wrap narrow">${worker.model}<div class="muted small">${[worker.engine, worker.device].filter(Boolean).join(" on ")}</div></td>
        <td>${worker.roles.join(" + ")}<div class="muted small">${worker.kind}${worker.price ? `, ${number(worker.price, 2)} per hour` : ""}</div></td><td class="number">${count(worker.requests)}<div class="muted small">${number(worker.tokens_per_second, 1)} tokens/s</div></td>
        <td class="number">${worker.beat?.gauges.worker_memory_budget_bytes ? html`${bytes(worker.beat.gauges.worker_memory_bytes)}<div class="muted small">of ${bytes(worker.beat.gauges.worker_memory_budget_bytes)}</div>` : "–"}<div class="muted small">${counted(worker.adapters, "adapter")}</div></td>
        <td><${Parts} parts=${worker.beat?.memory_parts ?? {}} /></td><td class="wrap small">${worker.note || "–"}${worker.beat?.lanes && html`<div class="muted">${worker.beat.lanes}</div>`}</td></tr>`)}</tbody></table><//>`}
    ${costs?.workers.length > 0 && html`<h2>What the fleet costs</h2><${Scroll} label="Costs of the fleet"><table><thead><tr><th>Base model</th><th>Kind</th><th class="number">Hours</th><th class="number">Cost</th><th class="number">Used</th><th class="number">Idle</th><th class="number">In progress</th></tr></thead>
      <tbody>${costs.workers.map((one) => html`<tr><td class="wrap narrow">${one.model}</td><td>${one.kind}</td><td class="number">${number(one.hours, 2)}</td><td class="number">${number(one.cost)}</td><td class="number">${number(one.used)}</td><td class="number">${number(one.idle)}</td><td class="number">${number(one.waiting)}</td></tr>`)}</tbody></table><//>`}
    <div class="bar"><h2>What happened to workers</h2><label><input type="checkbox" checked=${work} onChange=${() => setWork(!work)} /> with adapters and training</label></div>
    ${events?.length > 0 && html`<${Scroll} label="Events of workers"><table><thead><tr><th>Time</th><th>Worker</th><th>Event</th><th>Details</th></tr></thead>
      <tbody>${[...events].reverse().map((one) => html`<tr key=${one.number}><td class="small">${time(one.time)}</td><td class="wrap narrow">${one.worker}</td><td>${one.event}</td><td class="wrap small">${one.text || "–"}</td></tr>`)}</tbody></table><//>`}`;
}

/** How full each part of a worker's memory is. */
const Parts = ({ parts }) => Object.entries(parts).filter(([, [, budget]]) => budget > 0).map(([name, [used, budget]]) => html`<div class="part small" key=${name} title=${`${bytes(used)} of ${bytes(budget)}`}>
  <meter min="0" max=${budget} value=${used} aria-label=${`${name}: ${percent(used / budget)}`}></meter> ${name.replaceAll("_", " ")} ${percent(used / budget)}</div>`);
