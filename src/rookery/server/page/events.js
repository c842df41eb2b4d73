// The log of a run: what happened to it, and why.
import { useState } from "preact/hooks";
import { jobPath, useData } from "./api.js";
import { time } from "./format.js";
import { Empty, Loading, Problem, Scroll, html } from "./parts.js";

const FEW = 100, MANY = 1000;

export function Events({ job, view }) {
  const [limit, setLimit] = useState(FEW), [kind, setKind] = useState("");
  const { data, error } = useData(`${jobPath(job, "events")}?limit=${limit}`, view.finished ? 0 : 3000);
  if (!data) return html`<${Loading} error=${error} />`;
  const kinds = [...new Set(data.map((one) => one.kind))].sort(), shown = data.filter((one) => !kind || one.kind === kind).reverse();
  return html`<div class="bar"><h2>Events</h2><select aria-label="Kind of event" value=${kind} onChange=${(event) => setKind(event.target.value)}><option value="">every kind</option>${kinds.map((one) => html`<option value=${one}>${one.replaceAll("_", " ")}</option>`)}</select>
      ${data.length === limit && limit < MANY && html`<button onClick=${() => setLimit(MANY)}>Older events</button>`}</div>
    ${shown.length === 0 ? html`<${Empty}>Nothing happened yet.<//>` : html`<${Scroll} label="Events"><table><thead><tr><th>Time</th><th>Kind</th><th>What happened</th></tr></thead>
      <tbody>${shown.map((one, at) => html`<tr key=${at}><td class="small">${time(one.time)}</td><td>${one.kind.replaceAll("_", " ")}</td><td class="wrap">${one.text}</td></tr>`)}</tbody></table><//>`}`;
}
