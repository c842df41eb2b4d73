// The log of a run: what happened to it, and why.
import { useState } from "preact/hooks";
import { get, jobPath, useData } from "./api.js";
import { listed, time } from "./format.js";
import { Empty, Loading, Problem, Scroll, html } from "./parts.js";

const FEW = 100, MANY = 1000; // of a page at first, and at most

/** The newest `most` events, oldest first, and whether there are `older` ones. */
export const newestEvents = (most, read = get) => async (path, options) => {
  for (let found = [], older = ""; ;) {
    const page = await read(`${path}?limit=${Math.min(MANY, most - found.length)}${older && `&after=${older}`}`, { ...options, onPage: (after) => { older = after ?? ""; } });
    found = [...page, ...found];
    if (!older || found.length >= most) return { found, older: older !== "" };
  }
};

export function Events({ job, view }) {
  const [most, setMost] = useState(FEW), [kind, setKind] = useState("");
  const { data, error, reload } = useData(jobPath(job, "events"), view.finished ? 0 : 3000, newestEvents(most));
  if (!data) return html`<${Loading} error=${error} />`;
  const kinds = listed([...new Set(data.found.map((one) => one.kind))].sort(), kind), shown = data.found.filter((one) => !kind || one.kind === kind).reverse();
  return html`<div class="bar"><h2>Events</h2><select aria-label="Kind of event" value=${kind} onChange=${(event) => setKind(event.target.value)}><option value="">every kind</option>${kinds.map((one) => html`<option value=${one}>${one.replaceAll("_", " ")}</option>`)}</select>
      ${data.older && html`<button onClick=${() => { setMost(most + MANY); reload(); }}>Older events</button>`}</div>
    ${shown.length === 0 ? html`<${Empty}>${kind ? "No event of this kind is among these." : "Nothing happened yet."}<//>` : html`<${Scroll} label="Events"><table><thead><tr><th>Time</th><th>Kind</th><th>What happened</th></tr></thead>
      <tbody>${shown.map((one, at) => html`<tr key=${at}><td class="small">${time(one.time)}</td><td>${one.kind.replaceAll("_", " ")}</td><td class="wrap">${one.text}</td></tr>`)}</tbody></table><//>`}`;
}
