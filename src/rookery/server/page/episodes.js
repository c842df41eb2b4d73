// Episodes of a run: search over their texts, and those that failed.
import { useEffect, useState } from "preact/hooks";
import { get, jobPath, useData } from "./api.js";
import { ago, count, number, parseRoute, route } from "./format.js";
import { Answer, noneOf, prompts } from "./groups.js";
import { colored } from "./jobform.js";
import { Empty, Loading, NumberField, Problem, html, useTyped } from "./parts.js";
import { shorten } from "./text.js";

const PAGE = 20;

export function Episodes({ job, view, query }) {
  const [text, type, choose] = useTyped(query.text ?? ""), [more, setMore] = useState({ pages: [], of: null }), [goal, setGoal] = useState(PAGE), [problem, setProblem] = useState(null);
  const failed = query.failed === "true";
  const go = (change) => { location.hash = route(["run", job, "episodes"], { ...parseRoute(location.hash).query, ...change }); };
  const wanted = new URLSearchParams({ limit: PAGE });
  const filters = ["text", "failed", "min_reward", "max_reward", "version"].filter((name) => query[name]);
  for (const name of filters) wanted.set(name, query[name]);
  const { data, error } = useData(`${jobPath(job, "episodes")}?${wanted}`);
  const { data: failures, error: unread } = useData(failed ? jobPath(job, "failures") : null);
  useEffect(() => { setMore({ pages: [], of: data }); setGoal(PAGE); setProblem(null); }, [data]);
  const pages = data ? [data, ...(more.of === data ? more.pages : [])] : [], last = pages.at(-1);
  const shown = pages.flatMap((page) => page.episodes), searching = last?.next && shown.length < goal && !problem;
  useEffect(() => { // a page of a search ends after a time, with fewer than were asked for
    if (!searching) return undefined;
    const stop = new AbortController();
    wanted.set("before", last.next);
    get(`${jobPath(job, "episodes")}?${wanted}`, { signal: stop.signal }).then((page) => setMore((now) => ({ pages: [...(now.of === data ? now.pages : []), page], of: data })), (one) => stop.signal.aborted || setProblem(one));
    return () => stop.abort();
  }, [last, goal, problem]);
  return html`
    <form class="bar" onSubmit=${(event) => { event.preventDefault(); choose(text); go({ text }); }}>
      <input type="search" size="34" placeholder="Exact text of an episode or an error" aria-label="Search the texts" value=${text} onInput=${(event) => type(event.target.value)} />
      <button>Search</button>
      <label><input type="checkbox" checked=${failed} onChange=${() => go({ failed: failed ? "" : "true" })} /> failed only</label>
      <${NumberField} label="reward from" step="any" value=${query.min_reward ?? ""} onChoose=${(text) => go({ min_reward: text })} /><${NumberField} label="to" step="any" value=${query.max_reward ?? ""} onChoose=${(text) => go({ max_reward: text })} />
    </form>
    ${data ? html`<${Problem} error=${error ?? problem ?? unread} />` : html`<${Loading} error=${error} />`}
    ${failures?.length > 0 && html`<div class="panel"><h2 class="sub">Why episodes failed</h2><table><tbody>${failures.map((one) => html`<tr><td class="number">${count(one.episodes)}×</td><td class="wrap"><code>${one.error}</code></td></tr>`)}</tbody></table></div>`}
    ${data && !last.next && shown.length === 0 && html`<${Empty}>${filters.length ? "No episode that is kept is like that." : noneOf("episode", view)}<//>`}
    ${shown.map((one) => html`<section key=${one.episode} class="found"><p class="small muted"><a href=${route(["run", job, "group", one.group])}>group ${one.ordinal}</a>${one.consumed_by !== null ? `, trained into version ${one.consumed_by}` : ""}, ${ago(one.finished)} ago: <span class="prompt">${shorten(prompts(one.prompt), 200)}</span></p>
      <${Answer} job=${job} one=${one} policies=${colored(view.spec)} /></section>`)}
    ${searching ? html`<p class="muted" role="status">Searching, so far back to ${ago(last.reached)} ago …</p>`
      : last?.next && html`<div class="bar"><button onClick=${() => { setProblem(null); if (shown.length >= goal) setGoal(shown.length + PAGE); }}>${problem ? "Try again" : "Older episodes"}</button></div>`}`;
}
