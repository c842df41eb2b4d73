// A new run: the form of a job with its YAML next to it, a dry run with rendered prompts, and the submission.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { call, get, jobPath, useData } from "./api.js";
import { counted, number, route } from "./format.js";
import { EXAMPLE, at, brief, fieldsOf, inexact, likeJob, parseField, set, toYaml } from "./jobform.js";
import { Problem, Unread, html } from "./parts.js";
import { reach } from "./text.js";

export function Submit({ query }) {
  const { data: api, error: unread } = useData("/openapi.json"), { data: models, error: noModels } = useData("/api/v1/models");
  const [spec, setSpec] = useState(EXAMPLE), [tried, setTried] = useState(null), [error, setError] = useState(null), [busy, setBusy] = useState(""), [wrong, setWrong] = useState({}); // wrong: the fields that hold no JSON
  useEffect(() => {
    if (!query.from) return;
    get(jobPath(query.from)).then((view) => setSpec(likeJob(view, query.version === undefined ? undefined : Number(query.version))), setError);
  }, [query.from, query.version]);
  const send = async (path, done) => {
    if (Object.keys(wrong).length > 0) { setError(new Error(`${Object.keys(wrong).join(", ")}: not JSON; correct or empty it`)); return; }
    if (inexact(spec).length > 0) { setError(new Error(`${inexact(spec).join(", ")}: a browser loses the last digits of whole numbers above 2^53; give a smaller one, or submit the job with rookery run`)); return; }
    setBusy(path);
    setError(null);
    try { done(await call("POST", path, spec)); } catch (problem) { setError(problem); setTried(null); }
    setBusy("");
  };
  if (!api) return html`<${Unread} title="New run" error=${unread} />`;
  const schemas = api.components.schemas, fields = fieldsOf({ schemas }, schemas.JobSpec);
  const change = (path, value) => { setSpec((now) => set(now, path, value)); setTried(null); };
  const mark = (name, message) => setWrong(({ [name]: _, ...others }) => (message ? { ...others, [name]: message } : others));
  return html`<div class="bar"><h1>New run</h1><span class="muted">${query.from ? (query.version === undefined ? "with the settings of another run" : `from version ${query.version} of another run`) : "an example to change"}</span>
      <span class="right"><button onClick=${() => send("/api/v1/jobs/dry-run", setTried)} disabled=${busy !== ""}>${busy.endsWith("dry-run") ? "Tries it …" : "Dry run"}</button> <button class="main" disabled=${busy !== ""} onClick=${() => send("/api/v1/jobs", (view) => { location.hash = route(["run", view.id]); })}>Submit</button></span></div>
    <${Problem} error=${error ?? noModels} />
    ${tried && html`<${DryRun} tried=${tried} />`}
    <div class="two"><section class="panel form" aria-label="Settings">${fields.map((field) => field.name === "base_model"
      ? html`<label class="field" key="base_model">base_model <${About} field=${field} /><select value=${spec.base_model} onChange=${(event) => change(["base_model"], event.target.value)}>${[...new Set([spec.base_model, ...(models ?? []).filter((one) => one.state !== "refused").map((one) => one.name)])].map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`
      : field.name === "policies" || field.name === "environment" ? html`<${JsonField} key=${field.name} field=${field} spec=${spec} change=${change} mark=${mark} rows=${field.name === "environment" ? 13 : 4} />` : html`<${Field} key=${field.name} field=${field} spec=${spec} change=${change} mark=${mark} />`)}</section>
      <section class="panel beside" aria-label="As YAML"><h2 class="sub">job.yaml</h2><p class="muted small">The same for <code>rookery run job.yaml</code>.</p><pre class="yaml" tabindex="0">${toYaml(spec)}</pre></section></div>`;
}

const About = ({ field }) => field.description && html`<span class="small about">${brief(field.description)}</span>`;

function Field({ field, spec, change, mark }) {
  const value = at(spec, field.path), opened = useRef(false);
  opened.current ||= value !== undefined; // what is emptied to be written again stays in view
  if (field.kind === "object") return html`<details class="part" open=${opened.current}><summary>${field.name} <${About} field=${field} /></summary><div class="fields">${field.fields.map((one) => html`<${Field} key=${one.name} field=${one} spec=${spec} change=${change} mark=${mark} />`)}</div></details>`;
  if (field.kind === "json") return html`<${JsonField} field=${field} spec=${spec} change=${change} mark=${mark} rows=${2} />`;
  const hint = field.default === undefined || field.default === null ? "" : String(field.default);
  const give = (text) => change(field.path, field.kind === "boolean" ? { true: true, false: false }[text] : parseField(field.kind, text));
  const choices = field.kind === "boolean" ? ["true", "false"] : field.choices;
  return html`<label class="field" title=${field.description}>${field.name} <${About} field=${field} />
    ${choices ? html`<select value=${value === undefined ? "" : String(value)} onChange=${(event) => give(event.target.value)}><option value="">${hint || "–"} (default)</option>${choices.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
      : html`<${Written} kind=${field.kind} value=${value} hint=${hint} give=${give} />`}</label>`;
}

/** An input that keeps its text as it is written: `1.`, `0.0` and `1e`, on the way to another number, are not replaced by what they are so far. */
function Written({ kind, value, hint, give }) {
  const box = useRef(null);
  useLayoutEffect(() => { if (parseField(kind, box.current.value) !== value) box.current.value = String(value ?? ""); }, [value]); // before the next key is pressed
  return html`<input ref=${box} type=${kind === "text" ? "text" : "number"} step=${kind === "integer" ? 1 : "any"} placeholder=${hint} onInput=${(event) => give(event.target.value)} />`;
}

function JsonField({ field, spec, change, mark, rows }) {
  const value = at(spec, field.path), shown = value === undefined ? "" : JSON.stringify(value, null, 2);
  const [text, setText] = useState(shown), [wrong, setWrong] = useState("");
  const note = (message) => { setWrong(message); mark(field.path.join("."), message); };
  useEffect(() => { setText(shown); note(""); }, [shown]);
  const give = () => { try { change(field.path, parseField("json", text)); note(""); } catch (error) { note(`not JSON: ${error.message}`); } };
  return html`<label class="field" title=${field.description}>${field.name} <span class="small">(JSON)</span> <${About} field=${field} />
    <textarea class="mono" rows=${rows} value=${text} placeholder=${field.default ? JSON.stringify(field.default) : ""} onInput=${(event) => setText(event.target.value)} onBlur=${give} spellcheck="false"></textarea>
    ${wrong && html`<span class="bad small" role="alert">${wrong}</span>`}</label>`;
}

const DryRun = ({ tried }) => html`<section class="panel dry"><h2 class="sub">Dry run: this job would be accepted</h2>
  ${tried.warnings.map((line) => html`<p class="warn">${line}</p>`)}
  ${Object.entries(tried.constants).map(([policy, best]) => html`<p key=${policy}>The best constant reply${Object.keys(tried.spec.policies).length > 1 ? ` of ${policy}` : ""} on ${counted(best.prompts, "prompt")} earns <b>${number(best.reward)}</b>: <code>${best.reply}</code></p>`)}
  <div class="answers">${tried.prompts.map((one, at) => html`<article class="panel answer"><b>Prompt ${at + 1}</b> <span class="muted small">${counted(one.tokens, "token")}, as the policy reads it</span><pre tabindex=${reach(one.text)}>${one.text}</pre></article>`)}</div>
  <details><summary>with every default</summary><pre class="yaml" tabindex="0">${toYaml(tried.spec)}</pre></details></section>`;
