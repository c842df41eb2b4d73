// Up to four runs on the same axes.
import { useEffect, useState } from "preact/hooks";
import { laterRows, useData } from "./api.js";
import { Axis, Chart } from "./chart.js";
import { route } from "./format.js";
import { compared } from "./overview.js";
import { Empty, Loading, Problem, html } from "./parts.js";
import { COMPARED } from "./runs.js";

export function Compare({ path }) {
  const ids = path.slice(1, 1 + COMPARED), wanted = new URLSearchParams(ids.map((id) => ["id", id]));
  const { data, error } = useData(`/api/v1/runs?${wanted}`, 5000);
  const [rows, setRows] = useState(null), [problem, setProblem] = useState(null), [weight, setWeight] = useState(0), [zoom, setZoom] = useState(null);
  const done = data?.runs.map((run) => run.step).join();
  useEffect(() => {
    const stop = new AbortController();
    const newest = Object.fromEntries((data?.runs ?? []).map((run) => [run.id, run.step]));
    const known = (id) => (rows?.[id] ?? []).filter((row) => row.step < newest[id]); // a run that was rolled back has fewer steps
    Promise.allSettled(ids.map((id) => laterRows(id, known(id), stop.signal))).then((found) => {
      if (stop.signal.aborted) return;
      setRows(Object.fromEntries(found.map((one, at) => [ids[at], one.value ?? rows?.[ids[at]] ?? []])));
      setProblem(found.find((one) => one.reason)?.reason ?? null);
    });
    return () => stop.abort();
  }, [ids.join(), done]);
  const names = Object.fromEntries((data?.runs ?? []).map((run) => [run.id, run.name]));
  const label = (id) => (names[id] && ids.some((one) => one !== id && names[one] === names[id]) ? `${names[id]} (${id.slice(-4)})` : names[id] ?? id);
  const { steps, charts } = compared(ids.map((id) => rows?.[id] ?? []), ids.map(label));
  const parted = charts.some((chart) => chart.lines.length > ids.length); // lines have the colours of policies, not of runs
  const missing = data ? ids.filter((id) => !names[id]) : [];
  return html`<div class="bar"><h1>Compare</h1>${data && ids.map((id, at) => html`<span class="name">${!parted && html`<i class=${`swatch s${at}`}></i>`}<a href=${route(["run", id])}>${label(id)}</a></span>`)}
      <${Axis} steps=${steps} weight=${weight} onWeight=${setWeight} zoom=${zoom} onZoom=${setZoom} /></div>
    <${Problem} error=${error ?? problem} />
    ${missing.length > 0 && html`<div class="notice warn" role="status">Not found: ${missing.join(", ")}.</div>`}
    ${error && !data ? "" : !rows || !data ? html`<${Loading} />` : steps.length === 0 ? html`<${Empty}>None of these runs has committed a step.<//>` : html`<div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} ...${chart} steps=${steps} weight=${weight} zoom=${zoom} onZoom=${setZoom} />`)}</div>`}`;
}
