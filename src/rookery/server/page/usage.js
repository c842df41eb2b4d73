// What jobs and tenants used, against their limits.
import { useState } from "preact/hooks";
import { useData } from "./api.js";
import { bytes, count, duration, number, route, time } from "./format.js";
import { Badge, Empty, Facts, Loading, Pager, Problem, Scroll, html } from "./parts.js";

const PAGE = 50;

const NAMES = {
  jobs: "running jobs", waiting_jobs: "waiting jobs", requests: "requests at once", tokens_per_day: "tokens today", adapters: "adapters", models: "base models", hosts: "environment hosts", bytes: "bytes stored", database_bytes: "bytes in the database",
};

/** Whether the value of a limit limits anything. */
export const limited = (value) => value > 0 && value < 1e15;

/** What counts against each limit of an account: [{name, used, most, show}]; `most` is null where there is no limit. */
export const quotas = (account) => Object.entries(account?.used ?? {}).map(([key, used]) => {
  const limit = account.limits[key];
  return { name: NAMES[key] ?? key, used, most: limited(limit) ? limit : null, show: key.endsWith("bytes") ? bytes : key === "tokens_per_day" ? count : number };
});

export function Usage({ account }) {
  const [offset, setOffset] = useState(0);
  const { data, error } = useData(`/api/v1/usage?offset=${offset}&limit=${PAGE}`, 10000), { data: me, error: noAccount } = useData("/api/v1/account", 10000);
  const { data: costs, error: noCosts } = useData(account.role === "admin" ? "/api/v1/costs" : null, 10000);
  const bars = quotas(me);
  return html`<div class="bar"><h1>Usage</h1><a class="button right" href="/api/v1/usage.csv" download>Download as CSV</a></div>
    ${data ? html`<${Problem} error=${error ?? noAccount ?? noCosts} />` : html`<${Loading} error=${error} />`}
    ${me && html`<section class="panel"><h2 class="sub">${me.name}</h2><${Facts} facts=${[["cost", number(me.cost.cost)], ["compute", duration(me.cost.seconds)]]} />
      <div class="quotas">${bars.map(({ name, used, most, show }) => html`<div key=${name}><span>${name}</span> ${most ? html`<meter min="0" max=${most} high=${0.9 * most} value=${Math.min(used, most)} aria-label=${`${name}: ${show(used)} of ${show(most)}`}></meter> <b>${show(used)}</b> of ${show(most)}` : html`<b>${show(used)}</b> <span class="muted">without a limit</span>`}</div>`)}</div></section>`}
    ${costs && html`<h2>Tenants</h2><${Scroll} label="Tenants"><table><thead><tr><th>Tenant</th><th class="number">Cost</th><th class="number">Compute</th><th class="number">Tokens per price unit</th><th class="number">Service time</th></tr></thead>
      <tbody>${costs.tenants.map((one) => html`<tr key=${one.tenant}><td class="wrap narrow">${one.name}${one.deleted ? html` <span class="muted small">deleted</span>` : ""}</td><td class="number">${number(one.cost.cost)}</td><td class="number">${duration(one.cost.seconds)}</td><td class="number">${number(one.cost.tokens_per_unit)}</td><td class="number">${duration(one.service_seconds)}</td></tr>`)}</tbody></table><//>`}
    ${data && (data.total === 0 ? html`<${Empty}>No run used anything yet.<//>` : html`<h2>Runs</h2><${Scroll} label="Usage of runs"><table><thead><tr><th>Run</th>${account.role === "admin" && html`<th>Tenant</th>`}<th>State</th><th class="number">Steps</th><th class="number">Tokens sampled</th><th class="number">Compute</th><th class="number">Cost</th><th class="number">Preemptible part</th><th>Submitted</th></tr></thead>
      <tbody>${data.jobs.map((one) => html`<tr key=${one.job}><td class="wrap"><a href=${route(["run", one.job])}>${one.name}</a></td>${account.role === "admin" && html`<td class="wrap narrow">${one.tenant}</td>`}<td><${Badge} state=${one.state} /></td><td class="number">${count(one.steps)}</td><td class="number">${count(one.tokens)}</td><td class="number">${duration(one.seconds)}</td><td class="number">${number(one.cost)}</td><td class="number">${number(one.preemptible)}</td><td class="small">${time(one.created)}</td></tr>`)}</tbody></table><//>
      <${Pager} offset=${offset} size=${PAGE} total=${data.total} onOffset=${setOffset} />`)}`;
}
