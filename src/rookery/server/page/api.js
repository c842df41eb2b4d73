// Requests to the service's public API, and data that keeps itself fresh.
import { useEffect, useRef, useState } from "preact/hooks";
import { heard } from "./clock.js";

export class ApiError extends Error {
  constructor(status, message, problems = []) {
    super(message);
    this.status = status;
    this.problems = problems;
  }
}

/** JSON of the API; raises ApiError. The header tells the service that its own page asks. */
export async function call(method, path, body, { headers = {}, signal, onPage } = {}) {
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
  heard(response.headers.get("Date"));
  if (response.status === 204) return null;
  let data;
  try {
    data = await response.json();
  } catch {
    throw new ApiError(response.status, `the service answered ${response.status} without data`);
  }
  if (!response.ok) {
    const problem = new ApiError(response.status, data.error?.message ?? data.error ?? String(response.status), data.problems);
    if (response.status === 401) dispatchEvent(new CustomEvent("signed-out", { detail: problem }));
    throw problem;
  }
  onPage?.(response.headers.get("X-Next-Page"));
  return data;
}

export const get = (path, options) => call("GET", path, undefined, options);

/** All rows of a list, page by page. */
export async function getAll(path, options) {
  for (let rows = [], next = ""; ;) {
    rows = rows.concat(await get(next ? `${path}&after=${encodeURIComponent(next)}` : path, { ...options, onPage: (after) => { next = after; } }));
    if (!next) return rows;
  }
}

export const jobPath = (job, ...parts) => ["/api/v1/jobs", encodeURIComponent(job), ...parts].join("/");

const FIRST_PAUSE = 1000, LONGEST_PAUSE = 5000; // ms between attempts; somebody waits for a service that starts again, and only visible pages ask

/** Whether the service may answer the same request later. */
export const temporary = (error) => error.status === 0 || error.status === 429 || error.status >= 500;

/** {data, error, since, reload} of a path, read again every `every` milliseconds while the page is visible, and after an error that may pass, not after another one; `since` is the time from which there was no answer. A null path reads nothing; `read` is get or getAll. */
export function useData(path, every = 0, read = get) {
  const [state, setState] = useState({ path, data: null, error: null, since: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    let timer, first = true, pause = FIRST_PAUSE; // a tab that is opened hidden reads once
    const ask = async () => {
      let again = every;
      if (!document.hidden || first) {
        first = false;
        try {
          const data = await read(path, { signal: stop.signal });
          setState({ path, data, error: null, since: null });
          pause = FIRST_PAUSE;
        } catch (error) {
          if (stop.signal.aborted) return;
          setState((old) => ({ path, data: old.path === path ? old.data : null, error, since: (old.path === path ? old.since : null) ?? Date.now() / 1000 }));
          if (!temporary(error)) again = 0;
          else if (!every) [again, pause] = [pause, Math.min(2 * pause, LONGEST_PAUSE)];
        }
      } else if (!every) again = FIRST_PAUSE;
      if (again && !stop.signal.aborted) timer = setTimeout(ask, again);
    };
    ask();
    return () => { stop.abort(); clearTimeout(timer); };
  }, [path, every, turn]);
  const fresh = state.path === path ? state : { data: null, error: null, since: null };
  return { data: fresh.data, error: fresh.error, since: fresh.since, reload: () => setTurn((now) => now + 1) };
}

const PAGE = 2000;

/** The rows of a job's metrics that are known, with all later ones. The last known one is read again: where another one
 * is stored, the job was rolled back, and all are read again. */
export async function laterRows(job, known, signal, read = get) {
  for (let rows = known; ;) {
    const last = rows[rows.length - 1];
    const page = await read(`${jobPath(job, "metrics")}?after=${last ? Math.max(last.step - 1, -1) : -1}&limit=${PAGE}`, { signal });
    if (last && (page[0]?.step !== last.step || page[0].time !== last.time || page[0].renewed !== last.renewed)) { rows = []; continue; }
    rows = rows.slice(0, -1).concat(page);
    if (page.length < PAGE) return rows;
  }
}

/** {rows, job, live, error, since}: the metrics of a job, first what is stored, then as steps are committed; `since` is the time from which the service did not answer. A hidden page has no stream: a browser opens few connections to one server. */
export function useMetrics(job) {
  const [state, setState] = useState({ rows: [], job: null, live: false, loaded: false, error: null, since: null });
  const rows = useRef([]);
  useEffect(() => {
    if (!job) return undefined;
    const stop = new AbortController();
    let source = null, timer, frame = 0, changes = {}, pause = FIRST_PAUSE, attempt = 0, ended = false;
    rows.current = [];
    const show = (more) => {
      changes = { ...changes, ...more };
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => { const shown = changes; changes = {}; setState((old) => ({ ...old, ...shown, rows: rows.current, loaded: true })); });
    };
    const close = () => { attempt += 1; source?.close(); source = null; clearTimeout(timer); };
    const lost = (error) => {
      close();
      setState((old) => ({ ...old, live: false, since: old.since ?? Date.now() / 1000 }));
      if (error) show({ error });
      if (!error || temporary(error)) { timer = setTimeout(connect, pause); pause = Math.min(2 * pause, LONGEST_PAUSE); }
    };
    const connect = async () => {
      close();
      const mine = attempt;
      try {
        const found = await laterRows(job, rows.current, stop.signal);
        if (found.length === 0 && rows.current.length > 0) await get(jobPath(job), { signal: stop.signal }); // what a deleted run had stays on the page
        if (mine !== attempt) return;
        rows.current = found;
      } catch (error) {
        if (mine === attempt && !stop.signal.aborted) lost(error);
        return;
      }
      show({ error: null });
      if (document.hidden) return;
      const last = rows.current.length ? rows.current[rows.current.length - 1].step : -1;
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
      source.onopen = () => { pause = FIRST_PAUSE; setState((old) => ({ ...old, since: null })); };
      source.addEventListener("job", (event) => about(event, true));
      source.addEventListener("end", (event) => { ended = true; close(); about(event, false); });
      source.onerror = () => lost(null); // after an answer other than 200 a browser does not try again
    };
    const seen = () => {
      if (ended) return;
      if (!document.hidden) connect();
      else { close(); setState((old) => ({ ...old, live: false })); }
    };
    document.addEventListener("visibilitychange", seen);
    connect();
    return () => { document.removeEventListener("visibilitychange", seen); stop.abort(); close(); cancelAnimationFrame(frame); };
  }, [job]);
  return state;
}
