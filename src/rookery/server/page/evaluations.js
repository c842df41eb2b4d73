// The evaluations of a run on held-out prompts or rows, in figures.
import { useState } from "preact/hooks";
import { count, number, reward } from "./format.js";
import { sortedEvaluations } from "./overview.js";
import { Scroll, html } from "./parts.js";

const SHOWN = 12;

export function Evaluations({ evaluations, order }) {
  const [all, setAll] = useState(false), found = sortedEvaluations(evaluations, order), shown = all ? found : found.slice(0, SHOWN);
  if (found.length === 0) return null;
  const onRows = found.some((one) => one.loss !== null), several = new Set(found.map((one) => one.policy)).size > 1;
  const head = onRows ? ["Loss", "Chosen preferred", "Held-out rows"] : ["Mean reward", "Standard error", "Held-out prompts", "Best constant reply"];
  const cells = (one) => (onRows ? [number(one.loss, 4), number(one.accuracy), count(one.prompts)] : [reward(one.mean), reward(one.stderr), count(one.prompts), reward(one.constant?.reward)]);
  return html`<h2>Evaluations</h2>
    <${Scroll} label="Evaluations"><table><thead><tr>${several && html`<th>Policy</th>`}<th class="number">Version</th>${head.map((name) => html`<th key=${name} class="number">${name}</th>`)}</tr></thead>
      <tbody>${shown.map((one) => html`<tr key=${`${one.policy}/${one.version}`}>${several && html`<td class="wrap narrow">${one.policy}</td>`}<td class="number">${one.version}</td>${cells(one).map((cell, at) => html`<td key=${at} class="number">${cell}</td>`)}</tr>`)}</tbody></table><//>
    ${found.length > shown.length && html`<div class="bar"><button onClick=${() => setAll(true)}>All ${count(found.length)} evaluations</button></div>`}`;
}
