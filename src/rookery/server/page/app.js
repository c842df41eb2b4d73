// The page: who is signed in, which view is open, and the frame around it.
import { render } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { call, get, temporary } from "./api.js";
import { parseRoute } from "./format.js";
import { Boundary, Empty, Problem, Unread, html, switchTheme, useTitle } from "./parts.js";
import { Runs } from "./runs.js";
import { Compare } from "./compare.js";
import { Run } from "./run.js";
import { Chat } from "./chat.js";
import { Submit } from "./submit.js";
import { Fleet } from "./fleet.js";
import { Usage } from "./usage.js";
import { Tenants } from "./tenants.js";
import { TimelineView } from "./timeline.js";

const VIEWS = { runs: Runs, run: Run, compare: Compare, chat: Chat, new: Submit, usage: Usage, fleet: Fleet, timeline: TimelineView, tenants: Tenants };
const RETRY = 2000; // ms until a page that has no account asks for it again
const LINKS = [["runs", "Runs"], ["new", "New run"], ["chat", "Chat"], ["timeline", "Timeline"], ["usage", "Usage"], ["fleet", "Fleet", "admin"], ["tenants", "Tenants", "admin"]];

function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parseRoute(hash);
}

function SignIn({ onDone, error: before }) {
  const [key, setKey] = useState(""), [error, setError] = useState(null), [busy, setBusy] = useState(false);
  useTitle("Sign in");
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      if (!/^[\x21-\x7e]+$/.test(key.trim())) throw new Error("a key has letters, digits and dashes only; this text has other characters: copy it again");
      await call("POST", "/api/v1/sign-in", undefined, { headers: { Authorization: `Bearer ${key.trim()}` } });
      onDone();
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  return html`<main class="signin"><div class="panel">
    <h1>Rookery</h1>
    <p class="muted">Sign in with an API key. On the service's own machine <code>rookery open</code> does it for you.</p>
    <form onSubmit=${submit}>
      <label for="key">API key</label>
      <input id="key" type="password" autocomplete="current-password" placeholder="tml-…" value=${key} onInput=${(event) => setKey(event.target.value)} required />
      <button class="main" disabled=${busy}>Sign in</button>
    </form>
    <${Problem} error=${error ?? before} />
  </div></main>`;
}

/** A view without a title of its own. */
function Titled({ text, children }) {
  useTitle(text);
  return children;
}

/** Where a link was followed by the keyboard and is there no more, the keyboard continues at the beginning of the view. */
function useFocus(place) {
  const before = useRef(place);
  useLayoutEffect(() => {
    if (before.current !== place && document.activeElement === document.body) document.querySelector("main")?.focus();
    before.current = place;
  }, [place]);
}

function App() {
  const { path, query } = useRoute();
  const [account, setAccount] = useState(undefined), [error, setError] = useState(null); // undefined: not known yet
  const [link, setLink] = useState("");
  const load = async () => {
    try {
      const found = await get("/api/v1/account");
      setAccount(found);
      setError(null);
      return found;
    } catch (problem) {
      if (!temporary(problem)) setAccount(null);
      if (problem.status !== 401) setError(problem);
      return null;
    }
  };
  const again = async () => { // another tab may have signed in with another key
    if (document.hidden) return;
    try { setAccount(await get("/api/v1/account")); } catch { /* an answer of 401 signs out, and the views show the others */ }
  };
  const redeem = async (given) => {
    setLink("");
    try { await call("POST", `/api/v1/sign-in/links/${encodeURIComponent(given)}`); } catch (problem) {
      await load(); // a sign-in from before stays
      setError(problem);
      return;
    }
    await load();
  };
  useEffect(() => {
    const begin = async () => {
      if (path[0] === "link") {
        const given = path[1] ?? "";
        history.replaceState(null, "", "/#/runs");
        dispatchEvent(new Event("hashchange"));
        if (await load()) setLink(given); else await redeem(given);
      } else await load();
    };
    begin();
    const out = ({ detail }) => setAccount((before) => { if (before) setError(detail); return null; }); // who was signed in reads why that ended
    addEventListener("signed-out", out);
    document.addEventListener("visibilitychange", again);
    return () => { removeEventListener("signed-out", out); document.removeEventListener("visibilitychange", again); };
  }, []);
  useEffect(() => {
    if (account !== undefined || !error) return undefined;
    const timer = setTimeout(load, RETRY);
    return () => clearTimeout(timer);
  }, [account, error]);
  useFocus(path.join("/"));
  if (account === undefined) return html`<main><${Unread} title="Rookery" error=${error} /></main>`;
  if (account === null) return html`<${SignIn} onDone=${load} error=${error} />`;
  const name = path[0] ?? "runs", View = Object.hasOwn(VIEWS, name) ? VIEWS[name] : null;
  const signOut = async () => { try { await call("POST", "/api/v1/sign-out"); setAccount(null); } catch (problem) { setError(problem); } };
  const of = `${account.tenant}/${View === Run ? path[1] : ""}`; // what a view remembers is of one tenant, and of one run
  const inside = View ? html`<${View} key=${of} path=${path} query=${query} account=${account} />` : html`<${Empty}>There is no such view. <a href="#/runs">All runs</a><//>`;
  const shown = View === Run ? inside : html`<${Titled} text=${LINKS.find(([to]) => to === name)?.[1] ?? (View ? "Compare" : "No such view")}>${inside}<//>`;
  const links = LINKS.filter(([, , role]) => !role || role === account.role);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.querySelector("main").focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#/runs"><img src="/page/icon.svg" alt="" />Rookery</a>
      <nav aria-label="Views">${links.map(([to, label]) => html`<a href=${`#/${to}`} aria-current=${(name === to || (to === "runs" && ["run", "compare"].includes(name))) ? "page" : undefined}>${label}</a>`)}</nav>
      <div class="who"><span class="name">${account.name}</span>
        <button onClick=${switchTheme} aria-label="Switch between dark and light">◐</button>
        <button onClick=${signOut}>Sign out</button></div>
    </header>
    <main id="main" tabindex="-1">${link && html`<div class="notice warn bar" role="alert"><span>This link signs in with a key, perhaps another one than that of ${account.name}.</span><button onClick=${() => redeem(link)}>Use the link</button><button onClick=${() => setLink("")}>Stay signed in as ${account.name}</button></div>`}<${Problem} error=${error} /><${Boundary} at=${location.hash}>${shown}<//></main>`;
}

render(html`<${App} />`, document.getElementById("app"));
