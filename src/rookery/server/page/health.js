// What is wrong with a run and what to do; advice where nothing is.
import { jobPath, useData } from "./api.js";
import { Problem, html } from "./parts.js";

const REFRESH = 10000; // ms: alarms are about steps, not about moments

export function Health({ job, view }) {
  const { data, error } = useData(jobPath(job, "health"), view.finished ? 0 : REFRESH);
  if (!data) return html`<${Problem} error=${error} />`;
  if (data.alarms.length === 0 && data.advice.length === 0) return null;
  return html`<section aria-label="Health">
    ${data.alarms.map((one) => html`<div key=${`${one.policy}/${one.name}`} class="notice warn" role="status"><b class="warn">⚠ ${one.policy ? `${one.policy}: ${one.name}` : one.name}</b>: ${one.problem}. <span class="muted">${one.remedy[0].toUpperCase() + one.remedy.slice(1)}.</span></div>`)}
    ${data.advice.length > 0 && html`<div class="notice small"><b>Advice</b> (nothing is wrong): <ul>${data.advice.map((line) => html`<li>${line}</li>`)}</ul></div>`}</section>`;
}
