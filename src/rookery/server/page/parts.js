// Small pieces that all views share.
import { Component, h } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import htm from "htm";
import { count, counted, isNumber, number, sparkPath } from "./format.js";

export const html = htm.bind(h);

/** The states of groups and episodes that do not explain themselves. */
const STATES = { open: "it runs", ready: "complete, and not trained on yet", consumed: "a step was trained on it", dropped: "too old to be trained on, or its run has ended" };

export const Badge = ({ state }) => html`<span class=${`badge ${state.replaceAll(" ", "-")}`} title=${STATES[state]}>${state}</span>`;

export function Sparkline({ values, width = 110, height = 24 }) {
  const path = sparkPath(values, width, height);
  if (!path) return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"></svg>`; // the figures before it stay in their column
  const label = `${counted(values.length, "step")}, from ${number(values[0])} to ${number(values[values.length - 1])}`;
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${label}><path d=${path} /></svg>`;
}

export function Progress({ done, all }) {
  const width = all ? 80 * Math.min(1, done / all) : 0;
  return html`<span class=${`progress ${all ? "" : "none"}`} aria-hidden="true"><svg width="80" height="8"><rect width=${width} height="8" /></svg></span>`;
}

export const Problem = ({ error }) => error && html`<div class="notice bad" role="alert">${error.message}
  ${error.problems?.length > 1 && html`<ul>${error.problems.map((line) => html`<li>${line}</li>`)}</ul>`}</div>`;

/** The title of the document, by which tabs and the history differ. */
export const useTitle = (text) => useEffect(() => { document.title = text ? `${text} – Rookery` : "Rookery"; }, [text]);

/** [text, type, choose] of an input over a value of the address. What is typed stays, also when a value chosen before it arrives; a link or the way back replaces it. */
export function useTyped(value) {
  const [typed, setTyped] = useState(null), { current: known } = useRef({ value, chosen: undefined, others: 0 });
  if (known.value !== value) {
    if (known.chosen !== value) known.others += 1; // somebody else changed the address
    Object.assign(known, { value, chosen: undefined });
  }
  const type = (text) => setTyped({ text, others: known.others }), choose = (text) => { type(text); if (text !== value) known.chosen = text; };
  return [typed?.others === known.others ? typed.text : value, type, choose];
}

/** A number that counts once it is chosen. What is typed stays until then, also where the view is drawn again meanwhile. */
export function NumberField({ label, value, onChoose, ...more }) {
  const [typed, setTyped] = useState(null);
  return html`<label>${label} <input class="short" type="number" value=${typed ?? value} ...${more} onInput=${(event) => setTyped(event.target.value)}
    onChange=${(event) => { setTyped(null); onChoose(event.target.value); }} /></label>`;
}

const DARK = matchMedia("(prefers-color-scheme: dark)");
const themeNow = () => document.documentElement.dataset.theme ?? (DARK.matches ? "dark" : "light");

/** "dark" or "light", as the reader chose it or the system has it; what draws by itself draws again when it changes. */
export function useTheme() {
  const [theme, setTheme] = useState(themeNow);
  useEffect(() => {
    const changed = () => setTheme(themeNow());
    addEventListener("theme", changed);
    DARK.addEventListener("change", changed);
    return () => { removeEventListener("theme", changed); DARK.removeEventListener("change", changed); };
  }, []);
  return theme;
}

export function switchTheme() {
  document.documentElement.dataset.theme = themeNow() === "dark" ? "light" : "dark";
  localStorage.setItem("rookery-theme", document.documentElement.dataset.theme);
  dispatchEvent(new Event("theme"));
}

let chosen, folded = []; // the reader's theme, and the reasoning that is not shown, while the page is printed
/** Paper is light and has whole texts: pictures are drawn again before the browser takes the page, and after it. */
function forPaper(event) {
  const { dataset } = document.documentElement, before = event.type === "beforeprint";
  if (before) [chosen, dataset.theme, folded] = [dataset.theme, "light", [...document.querySelectorAll("details.think:not([open])")]];
  else if (chosen === undefined) delete dataset.theme;
  else dataset.theme = chosen;
  for (const one of folded) one.open = before;
  dispatchEvent(new Event("theme"));
}
for (const moment of ["beforeprint", "afterprint"]) addEventListener(moment, forPaper);

/** A button of an act that cannot be undone: it asks first. `verb` is the act, as in "revoke". */
export function Confirmed({ verb, question, about = "", small = false, disabled = false, onYes }) {
  const [asked, setAsked] = useState(false), box = useRef(null), before = useRef(false), size = small ? " small" : "";
  useLayoutEffect(() => { // the focused button is replaced: at once, the keyboard continues where the question stands
    if (asked || before.current) box.current.querySelector("button:last-of-type").focus();
    before.current = asked;
  }, [asked]);
  const label = verb[0].toUpperCase() + verb.slice(1);
  return html`<span class="confirmed" ref=${box}>${asked
    ? html`<span role="alert">${question}</span> <button class=${`danger${size}`} onClick=${() => { setAsked(false); onYes(); }}>Yes, ${verb}</button> <button class=${size.trim()} onClick=${() => setAsked(false)}>No</button>`
    : html`<button class=${`danger${size}`} disabled=${disabled} aria-label=${about ? `${label} ${about}` : undefined} onClick=${() => setAsked(true)}>${label}</button>`}</span>`;
}

/** What is inside, or the error that it raised, until `at` changes. */
export class Boundary extends Component {
  static getDerivedStateFromError(error) { return { error }; }
  componentDidUpdate({ at }) { if (at !== this.props.at && this.state.error) this.setState({ error: null }); }
  render({ children }, { error }) {
    return error ? html`<div class="notice bad" role="alert">The page cannot show this: ${error.message}. <a href="#/runs">All runs</a></div>` : children;
  }
}

/** In the place of data that was not read yet, or cannot be read. */
export const Loading = ({ error }) => (error ? html`<${Problem} error=${error} />` : html`<p class="muted" role="status">Loading …</p>`);

/** A view that was not read yet, or cannot be read. */
export const Unread = ({ title, error }) => html`<div class="bar"><h1>${title}</h1></div><${Loading} error=${error} />`;

export const Empty = ({ children }) => html`<div class="panel empty">${children}</div>`;

export const Facts = ({ facts }) => facts.length > 0 && html`<dl class="facts">${facts
  .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–")
  .map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const signed = (value, digits = 3) => (isNumber(value) ? `${value > 0 ? "+" : ""}${number(value, digits)}` : "–");

/** The buttons of a list that is read page by page; nothing where one page has it all. */
export const Pager = ({ offset, size, total, newestFirst = true, onOffset }) => (total > size || offset > 0) && html`<div class="bar"><button disabled=${offset === 0} onClick=${() => onOffset(Math.max(0, offset - size))}>${newestFirst ? "Newer" : "Previous"}</button>
  <span class="muted">${offset < total ? `${count(offset + 1)} to ${count(Math.min(offset + size, total))}` : "none"} of ${count(total)}</span><button disabled=${offset + size >= total} onClick=${() => onOffset(offset + size)}>${newestFirst ? "Older" : "Next"}</button></div>`;

/** A scrolling region that the keyboard reaches. */
export const Scroll = ({ label, children }) => html`<div class="scroll panel" tabindex="0" role="region" aria-label=${label}>${children}</div>`;
