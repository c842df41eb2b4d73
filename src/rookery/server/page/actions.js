// What its owner does with a run: pause, resume, cancel, delete, download, begin another from it.
import { useState } from "preact/hooks";
import { call, jobPath } from "./api.js";
import { route } from "./format.js";
import { trained } from "./jobform.js";
import { Confirmed, Problem, html } from "./parts.js";

const ALLOWED = { queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"] };
const ASKED = { cancel: "End this run for good? Its versions stay.", delete: "Delete this run with its versions and all its results?" };

export function Actions({ job, view, account, reload }) {
  const [error, setError] = useState(null), [busy, setBusy] = useState(false);
  const act = async (name) => {
    setBusy(true);
    try {
      await call(name === "delete" ? "DELETE" : "POST", name === "delete" ? jobPath(job) : jobPath(job, name));
      setError(null);
      if (name === "delete") location.hash = "#/runs"; else reload();
    } catch (problem) { setError(problem); }
    setBusy(false);
  };
  const policies = trained(view.spec), first = policies[0], version = view.policies.find((one) => one.name === first)?.version ?? 0;
  const target = first === Object.keys(view.spec.policies)[0] ? job : `${job}/${first}`; // a job alone means its first policy, trained or not
  const waits = view.paused_by === "outage" ? ["pause"] : []; // it resumes by itself
  const names = view.finished ? ["delete"] : [...waits, ...(ALLOWED[view.state] ?? [])];
  return html`<div class="bar actions">
    ${names.map((name) => ASKED[name] ? html`<${Confirmed} key=${name} verb=${name} question=${ASKED[name]} disabled=${busy} onYes=${() => act(name)} />`
      : html`<button key=${name} disabled=${busy} onClick=${() => act(name)}>${name[0].toUpperCase() + name.slice(1)}</button>`)}
    ${view.step > 0 && html`${policies.map((name) => html`<a key=${name} class="button" href=${jobPath(job, "policies", encodeURIComponent(name), "versions/latest/adapter")} download>Download adapter${policies.length > 1 ? ` of ${name}` : ""}</a>`)}
      ${view.tenant === account.name && html`<a class="button" href=${route(["chat"], { target })}>Chat</a>`}<a class="button" href=${route(["new"], { from: job, version })}>New run from version ${version}</a>`}
    <a class="button" href=${route(["new"], { from: job })}>New run like this</a>
    </div><${Problem} error=${error} />`;
}
