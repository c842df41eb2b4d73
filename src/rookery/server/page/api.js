// Requests to the service's public API, and data that keeps itself fresh.
import { useEffect, useRef, useState } from "preact/hooks";

export class ApiError extends Error {
  constructor(status, message, problems = []) {
    super(message);
    this.status = status;
    this.problems = problems;
  }
}

/** JSON of the API; raises ApiError. The header tells the service that its own page asks. */
export async function call(method, path, body, { headers = {}, signal } = {}) {
  const options = { method, signal, headers: { "X-Rookery-Page": "1", ...headers }, credentials: "same-origin" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the service does not answer");
  }
  if (response.status === 204) return null;
  let data;
  try {
    data = await response.json();
  } catch {
    throw new ApiError(response.status, `the service answered ${response.status} without data`);
  }
  if (!response.ok) {
    if (response.status === 401) window.dispatchEvent(new Event("signed-out"));
    throw new ApiError(response.status, data.error?.message ?? data.error ?? String(response.status), data.problems);
  }
  return data;
}

export const get = (path, options) => call("GET", path, undefined, options);

export const jobPath = (job, ...parts) => ["/api/v1/jobs", encodeURIComponent(job), ...parts].join("/");

/** {data, error, reload} of a path, read again every `every` milliseconds while the page is visible. A null path reads nothing. */
export function useData(path, every = 0) {
  const [state, setState] = useState({ path, data: null, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    let timer, first = true; // a tab that is opened hidden reads once
    const read = async () => {
      if (!document.hidden || first) {
        first = false;
        try {
          const data = await get(path, { signal: stop.signal });
          setState({ path, data, error: null });
        } catch (error) {
          if (stop.signal.aborted) return;
          setState((old) => ({ path, data: old.path === path ? old.data : null, error }));
        }
      }
      if (every && !stop.signal.aborted) timer = setTimeout(read, every);
    };
    read();
    return () => { stop.abort(); clearTimeout(timer); };
  }, [path, every, turn]);
  const fresh = state.path === path ? state : { data: null, error: null };
  return { data: fresh.data, error: fresh.error, reload: () => setTurn(turn + 1) };
}

const PAGE = 2000;

/** The rows of a job's metrics that are known, with all later ones. The last known one is read again: where another one
 * is stored, the job was rolled back, and all are read again. */
export async function laterRows(job, known, signal, read = get) {
  for (let rows = known; ;) {
    const last = rows[rows.length - 1];
    const page = await read(`${jobPath(job, "metrics")}?after=${last ? Math.max(last.step - 1, -1) : -1}&limit=${PAGE}`, { signal });
    if (last && (page[0]?.step !== last.step || page[0].time !== last.time)) { rows = []; continue; }
    rows = rows.slice(0, -1).concat(page);
    if (page.length < PAGE) return rows;
  }
}

/** {rows, job, live, error}: the metrics of a job, first what is stored, then as steps are committed. */
export function useMetrics(job) {
  const [state, setState] = useState({ rows: [], job: null, live: false, loaded: false, error: null });
  const rows = useRef([]);
  useEffect(() => {
    if (!job) return undefined;
    const stop = new AbortController();
    let source, frame = 0;
    rows.current = [];
    const show = (more) => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => setState((old) => ({ ...old, rows: rows.current, ...more, loaded: true })));
    };
    const start = async () => {
      try {
        rows.current = await laterRows(job, [], stop.signal);
        show({ error: null });
      } catch (error) {
        if (!stop.signal.aborted) show({ error });
        return;
      }
      const last = rows.current.length ? rows.current[rows.current.length - 1].step : -1;
      if (stop.signal.aborted) return;
      source = new EventSource(`${jobPath(job, "metrics/stream")}?after=${last}`);
      source.addEventListener("metrics", (event) => {
        const row = JSON.parse(event.data);
        rows.current = [...rows.current.filter((old) => old.step < row.step), row];
        show({ live: true });
      });
      source.addEventListener("rollback", (event) => {
        const { step } = JSON.parse(event.data);
        rows.current = rows.current.filter((row) => row.step <= step);
        show({ live: true });
      });
      const about = (event, live) => setState((old) => ({ ...old, job: JSON.parse(event.data), live }));
      source.addEventListener("job", (event) => about(event, true));
      source.addEventListener("end", (event) => { source.close(); about(event, false); });
      source.onerror = () => setState((old) => ({ ...old, live: false }));
    };
    start();
    return () => { stop.abort(); source?.close(); cancelAnimationFrame(frame); };
  }, [job]);
  return state;
}
