// Tenants, their keys and limits, for administrators.
import { useState } from "preact/hooks";
import { call, getAll, useData } from "./api.js";
import { count, duration, number, time } from "./format.js";
import { Confirmed, Problem, Scroll, Unread, html } from "./parts.js";
import { limited } from "./usage.js";

const SHOWN = ["jobs", "requests", "tokens_per_day", "adapters", "models", "weight"];

export function Tenants() {
  const { data, error, reload } = useData("/api/v1/tenants?limit=1000", 5000, getAll);
  const [name, setName] = useState(""), [open, setOpen] = useState(""), [problem, setProblem] = useState(null);
  const add = async (event) => {
    event.preventDefault();
    try { const made = await call("POST", "/api/v1/tenants", { name }); setName(""); setOpen(made.id); setProblem(null); reload(); } catch (one) { setProblem(one); }
  };
  if (!data) return html`<${Unread} title="Tenants" error=${error} />`;
  const chosen = data.find((one) => one.id === open);
  return html`<div class="bar"><h1>Tenants</h1><form class="bar right" onSubmit=${add}><input aria-label="Name of a new tenant" placeholder="name" value=${name} onInput=${(event) => setName(event.target.value)} required /><button>Add tenant</button></form></div>
    <${Problem} error=${problem ?? error} />
    <${Scroll} label="Tenants"><table><thead><tr><th>Tenant</th><th class="number">Tokens today</th><th class="number">Requests</th><th class="number">Service time</th>${SHOWN.map((one) => html`<th class="number">${one.replaceAll("_", " ")}</th>`)}<th>Since</th></tr></thead>
      <tbody>${data.map((one) => html`<tr key=${one.id}><td class="wrap"><button aria-expanded=${one.id === open} onClick=${() => setOpen(one.id === open ? "" : one.id)}>${one.name}</button></td><td class="number">${count(one.tokens_today)}</td><td class="number">${count(one.requests)}</td><td class="number">${duration(one.service_seconds)}</td>
        ${SHOWN.map((limit) => html`<td class="number">${limited(one.limits[limit]) || limit !== "tokens_per_day" && one.limits[limit] < 1e15 ? number(one.limits[limit], 1) : "–"}${limit in one.overrides ? " *" : ""}</td>`)}<td class="small">${time(one.created)}</td></tr>`)}</tbody></table><//>
    <p class="muted small">* differs from the service's setting. A name opens its keys and limits.</p>
    ${chosen && html`<${Tenant} key=${chosen.id} tenant=${chosen} reload=${reload} />`}`;
}

function Tenant({ tenant, reload }) {
  const path = `/api/v1/tenants/${encodeURIComponent(tenant.id)}`;
  const { data: keys, error: unread, reload: again } = useData(`${path}/keys?limit=1000`, 0, getAll);
  const [label, setLabel] = useState(""), [made, setMade] = useState(null), [problem, setProblem] = useState(null), [limit, setLimit] = useState("jobs"), [value, setValue] = useState("");
  const act = async (work) => { try { await work(); setProblem(null); again(); reload(); } catch (one) { setProblem(one); } };
  return html`<section class="panel"><h2>${tenant.name}</h2><${Problem} error=${problem ?? unread} />
    ${made && html`<div class="notice" role="status">The new key, shown only now: <code>${made.key}</code></div>`}
    <form class="bar" onSubmit=${(event) => { event.preventDefault(); act(async () => { setMade(await call("POST", `${path}/keys`, { label })); setLabel(""); }); }}><input aria-label="Label of a new key" placeholder="label" value=${label} onInput=${(event) => setLabel(event.target.value)} /><button>New key</button></form>
    <${Scroll} label="Keys"><table><thead><tr><th>Key</th><th>Label</th><th>Role</th><th>Created</th><th>Valid</th><th><span class="skip">Revoke</span></th></tr></thead><tbody>${(keys ?? []).map((key) => html`<tr key=${key.id}><td class="mono">${key.id}</td><td class="wrap narrow">${key.label || "–"}</td><td>${key.role}</td><td class="small">${time(key.created)}</td>
      <td>${key.revoked ? html`<span class="muted">revoked ${time(key.revoked)}</span>` : key.expires ? `until ${time(key.expires)}` : "yes"}</td><td>${!key.revoked && html`<${Confirmed} verb="revoke" about=${`key ${key.id}`} question="Revoke it for good?" small onYes=${() => act(() => call("DELETE", `${path}/keys/${key.id}`))} />`}</td></tr>`)}</tbody></table><//>
    <form class="bar" onSubmit=${(event) => { event.preventDefault(); act(() => call("PUT", `${path}/limits`, { [limit]: value === "" ? null : Number(value) })); }}><label>Limit <select value=${limit} onChange=${(event) => setLimit(event.target.value)}>${Object.keys(tenant.limits).map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
      <input type="number" step="any" aria-label="Value of the limit" placeholder=${number(tenant.limits[limit], 1)} value=${value} onInput=${(event) => setValue(event.target.value)} /><button>Set</button><span class="muted small">empty: the service's setting</span></form></section>`;
}
