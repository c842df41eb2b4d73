// The timeline: what each worker and each tenant or run did, from weeks to milliseconds.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { getAll, useData } from "./api.js";
import { now as serviceNow } from "./clock.js";
import { duration, percent, route, time } from "./format.js";
import { KINDS, LANES_SHOWN, MARKS, about, lanesOf, moved, packed, sameSpan, scaleOf, seconds, ticks, within, zoomed } from "./lanes.js";
import { Empty, Loading, Problem, Scroll, html, useTheme } from "./parts.js";

const STRIP = 12, HEAD = 17, AXIS = 22, GAP = 7, FINGER = 10; // pixels; a finger means a span within the last
const LIVE = 2000, COLUMNS = 1200;
const SPANS = [[60, "1 minute"], [600, "10 minutes"], [3600, "1 hour"], [86400, "1 day"]];

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const gutter = (width) => (width < 560 ? 84 : 170);
const keyOf = (lane) => `${lane.worker}${lane.key}`;
const heightOf = (lane) => HEAD + STRIP * Object.keys(lane.strips).length + GAP;

/** `path` is the endpoint: that of the service, or of a run. */
export function Timeline({ path = "/api/v1/timeline", trace = "/api/v1/timeline/trace", account, names = {}, job = null, first = null }) {
  const [last, setLast] = useState(600), [view, setView] = useState(first), [at, setAt] = useState(null);
  const seen = useRef(null), age = seen.current ? seen.current.end - seen.current.oldest : last;
  const length = Math.min(last, 30 * Math.ceil((age + 1) / 30)); // a short past is shown as fine as it can be
  const { data, error } = useData(`${path}?${view ? `start=${view.start}&end=${view.end}` : `seconds=${length}`}&columns=${COLUMNS}`, view ? 0 : LIVE);
  if (data) seen.current = data;
  const shown = data ?? seen.current;
  if (!shown) return html`<${Loading} error=${error} />`;
  const now = view ?? { start: Math.max(shown.start, Math.min(shown.oldest - 1, shown.end - 10)), end: shown.end }, by = account?.role === "admin" && !job ? "tenant" : "job";
  const lanes = lanesOf(shown.spans, { by, names });
  const go = (to) => setView(to);
  const all = () => go({ start: Math.max(0, shown.oldest - 1), end: serviceNow() });
  return html`
    <div class="bar">${SPANS.map(([length, label]) => html`<button key=${length} class="small" aria-pressed=${!view && last === length} onClick=${() => { setView(null); setLast(length); }}>${label}</button>`)}
      <button class="small" onClick=${all}>All that is kept</button>
      <button class="small" aria-label="Earlier" onClick=${() => go(moved(now, -0.5))}>◀</button><button class="small" aria-label="Later" onClick=${() => go(moved(now, 0.5))}>▶</button>
      <button class="small" aria-label="Zoom in" onClick=${() => go(zoomed(now, 0.5))}>+</button><button class="small" aria-label="Zoom out" onClick=${() => go(zoomed(now, 2))}>−</button>
      <span class="muted small">${time(now.start)}, ${duration(now.end - now.start)}${view ? "" : html` <span class="good">● live</span>`}</span>
      <a class="button small right" href=${trace} download>Download trace (Perfetto)</a></div>
    <${Problem} error=${error} />
    <p class="legend small">${Object.entries(KINDS).map(([kind, name]) => html`<span key=${kind}><svg width="12" height="12" aria-hidden="true"><rect class=${`kind ${kind}`} width="12" height="12" rx="2" /></svg> ${kind === "busy" ? "busy for others" : kind}</span>`)}
      ${Object.entries(MARKS).map(([kind, [glyph, , one]]) => html`<span key=${kind}><b class=${`mark-${kind}`} aria-hidden="true">${glyph}</b> ${one}</span>`)}</p>
    ${shown.complete_from > now.start && html`<p class="notice warn small" role="status">Spans before ${time(shown.complete_from)} are left out, as there are too many: choose a shorter time.</p>`}
    ${lanes.length === 0 ? html`<${Empty}>${shown.oldest > now.end ? `Nothing of this time is kept: what is kept begins at ${time(shown.oldest)}. ` : "Nothing happened in this time. "}${(shown.oldest < now.start || shown.oldest > now.end) && html`<button onClick=${all}>Show all that is kept</button>`}<//>` : html`
      <${Lanes} lanes=${lanes.slice(0, LANES_SHOWN)} view=${now} at=${at} onView=${go} onAll=${all} onAt=${setAt} />
      <p class="small about" aria-live="polite">${at ? html`${about(at.span, names)}${at.span.job && !job && at.span.job.startsWith("job-") ? html` · <a href=${route(["run", at.span.job])}>open the run</a>` : ""}` : html`<span class="muted mouse">Point at a span. Drag to zoom, double-click to show all. With the keyboard: ↑ and ↓ go from span to span, ← and → through time, + and − zoom.</span><span class="muted touch">Touch a span for what it is; drag across to zoom.</span>`}</p>
      ${lanes.length > LANES_SHOWN && html`<p class="muted small">${lanes.length - LANES_SHOWN} lanes more are in the table.</p>`}
      <${Shares} lanes=${lanes} view=${now} />`}`;
}

function Lanes({ lanes, view, at, onView, onAll, onAt }) {
  const canvas = useRef(null), spots = useRef([]), drag = useRef(null);
  const [width, setWidth] = useState(0);
  useTheme(); // the canvas has its colors from it
  useEffect(() => {
    const watch = new ResizeObserver(() => setWidth(canvas.current?.parentElement.clientWidth ?? 0));
    watch.observe(canvas.current.parentElement);
    return () => watch.disconnect();
  }, []);
  const height = AXIS + lanes.reduce((sum, lane) => sum + heightOf(lane), 0), left = gutter(width);
  useLayoutEffect(() => { if (width) spots.current = draw(canvas.current, lanes, view, width, height, { at }); }); // at once, as a page that is printed waits for nothing
  const share = (event) => Math.min(1, Math.max(0, (event.offsetX - left) / (width - left)));
  const show = (place) => {
    const spot = spots.current[place];
    if (at?.place !== place || !sameSpot(at, spot)) onAt(spot ? { ...spot, place } : null);
  };
  const find = (event) => {
    const reach = event.pointerType === "touch" ? FINGER : 2; // pixels
    const hit = (spot) => event.offsetX >= spot.x - reach && event.offsetX <= spot.x + spot.width + reach && event.offsetY >= spot.y && event.offsetY <= spot.y + spot.height;
    show(spots.current.findLastIndex(hit));
  };
  const band = (event) => {
    if (!drag.current) return find(event);
    drag.current.to = share(event);
    draw(canvas.current, lanes, view, width, height, { band: drag.current });
    return undefined;
  };
  const release = (event) => {
    const { from, to } = drag.current ?? {}, length = view.end - view.start;
    drag.current = null;
    if (from === undefined) return;
    if (Math.abs(to - from) * (width - left) < 5) { find(event); return; }
    const [a, b] = [Math.min(from, to), Math.max(from, to)];
    onView(zoomed({ start: view.start + a * length, end: view.start + b * length }, 1));
  };
  const walk = (by) => {
    const last = sameSpot(spots.current[at?.place], at) ? at.place : spots.current.findIndex((spot) => sameSpot(spot, at));
    show(last < 0 ? 0 : Math.min(spots.current.length - 1, Math.max(0, last + by)));
  };
  const key = (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) { event.preventDefault(); walk(by); return; }
    const to = { ArrowLeft: () => moved(view, -0.2), ArrowRight: () => moved(view, 0.2), "+": () => zoomed(view, 0.5), "=": () => zoomed(view, 0.5), "-": () => zoomed(view, 2) }[event.key];
    if (to) { event.preventDefault(); onView(to()); }
  };
  const label = `Timeline of ${lanes.length} lanes over ${duration(view.end - view.start)}; the up and down arrow keys go from span to span; the table below has its figures`;
  return html`<div class="panel"><div class="lanes"><canvas ref=${canvas} height=${height} tabindex="0" role="application" aria-label=${label} onKeyDown=${key} onPointerMove=${band} onPointerLeave=${(event) => { if (event.pointerType !== "touch") onAt(null); }}
    onPointerDown=${(event) => { drag.current = { from: share(event), to: share(event) }; event.target.setPointerCapture(event.pointerId); }} onPointerUp=${release} onPointerCancel=${() => { drag.current = null; }} onDblClick=${onAll}></canvas></div></div>`;
}

/** Whether two spots are of the same span in the same lane: a worker's and its owner's both have it. */
const sameSpot = (a, b) => Boolean(a && b) && a.lane === b.lane && sameSpan(a.span, b.span);

/** As much of a text as `room` pixels hold; the table has all of it. */
function fitting(paint, text, room) {
  if (paint.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 0 && paint.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}

/** Paints the lanes, with a frame around the spot `at` and a shade over the `band` that is dragged; returns where each span is: [{x, y, width, height, span, lane}]. */
function draw(canvas, lanes, view, width, height, { at = null, band = null }) {
  const scale = scaleOf(width, height, devicePixelRatio || 1), left = gutter(width), found = [];
  canvas.width = width * scale; canvas.height = height * scale;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d"), x = (unix) => left + ((unix - view.start) / (view.end - view.start)) * (width - left);
  paint.scale(scale, scale);
  paint.font = "12px system-ui, sans-serif";
  paint.textBaseline = "middle";
  for (const { at, label } of ticks(view, width - left)) {
    paint.fillStyle = color("--grid");
    paint.fillRect(x(at), AXIS - 4, 1, height);
    paint.fillStyle = color("--muted");
    if (x(at) + 58 < width) paint.fillText(label, x(at) + 3, AXIS / 2);
  }
  let y = AXIS;
  const box = (lane, span, top, tall, shade, most = 1) => {
    const from = Math.max(left, x(span.start)), until = Math.min(width, Math.max(x(span.end), x(span.start) + 1));
    if (until <= left || from >= width) return;
    paint.fillStyle = shade;
    paint.globalAlpha = span.count > 1 && span.end > span.start ? most * (0.35 + 0.65 * Math.min(1, span.covered / (span.end - span.start))) : most;
    paint.fillRect(from, top, Math.max(1, until - from - (until - from > 4 ? 0.5 : 0)), tall);
    paint.globalAlpha = 1;
    found.push({ x: from, y: top, width: until - from, height: tall, span, lane });
  };
  for (const lane of lanes) {
    paint.fillStyle = color("--text");
    paint.font = "600 12px system-ui, sans-serif";
    const whole = `worker ${lane.name}`, room = left - 12; // the marks begin at `left`
    paint.fillText(lane.worker && paint.measureText(whole).width <= room ? whole : fitting(paint, lane.name, room), 2, y + HEAD / 2);
    paint.font = "10px system-ui, sans-serif";
    for (const span of lane.idle) box(keyOf(lane), span, y + HEAD - 5, 2, color(KINDS.idle));
    let top = y + HEAD;
    for (const [kind, spans] of Object.entries(lane.strips)) {
      paint.fillStyle = color("--muted");
      paint.textAlign = "right";
      paint.fillText(kind === "busy" ? "others" : kind, left - 6, top + STRIP / 2);
      paint.textAlign = "left";
      const rows = packed(spans), tall = Math.max(1.5, (STRIP - 2) / Math.max(1, rows.length));
      rows.forEach((row, place) => row.forEach((span) => box(keyOf(lane), span, top + Math.min(place * tall, STRIP - 3), Math.max(1, tall - (tall > 3 ? 0.5 : 0)), color(KINDS[kind]), kind === "busy" ? 0.5 : 1)));
      top += STRIP;
    }
    paint.font = "12px system-ui, sans-serif";
    for (const span of lane.marks) {
      const [glyph, name] = MARKS[span.kind], place = x(span.start);
      if (place < left || place > width) continue;
      paint.fillStyle = color(name);
      paint.fillText(glyph, place - 5, y + HEAD / 2 - 1);
      found.push({ x: place - 6, y, width: 12, height: HEAD, span, lane: keyOf(lane) });
    }
    y += heightOf(lane);
    paint.fillStyle = color("--line");
    paint.fillRect(0, y - GAP / 2, width, 1);
  }
  const framed = at && (sameSpot(found[at.place], at) ? found[at.place] : found.find((spot) => sameSpot(spot, at)));
  if (framed) {
    paint.strokeStyle = color("--text");
    paint.lineWidth = 2;
    paint.strokeRect(framed.x - 1, framed.y - 1, framed.width + 2, framed.height + 2);
  }
  if (band) {
    paint.globalAlpha = 0.18;
    paint.fillStyle = color("--accent");
    paint.fillRect(left + Math.min(band.from, band.to) * (width - left), AXIS, Math.abs(band.to - band.from) * (width - left), height - AXIS);
  }
  return found;
}

/** The same in figures: seconds of each kind, and the share of the shown time. */
function Shares({ lanes, view }) {
  const kinds = Object.keys(KINDS).filter((kind) => lanes.some((lane) => (kind === "idle" ? lane.idle.length : lane.strips[kind]?.length)));
  const length = view.end - view.start;
  const cell = (spans) => {
    const total = seconds((spans ?? []).map((span) => within(span, view)));
    return total > 0 ? html`${duration(total)} <span class="muted small">${percent(total / length)}</span>` : "–";
  };
  return html`<${Scroll} label="Time by lane"><table><thead><tr><th>Lane</th>${kinds.map((kind) => html`<th key=${kind} class="number">${kind === "busy" ? "busy for others" : kind}</th>`)}<th>Moments</th></tr></thead>
    <tbody>${lanes.map((lane) => html`<tr key=${keyOf(lane)}><td class="wrap">${lane.worker ? "worker " : ""}<b>${lane.name}</b></td>${kinds.map((kind) => html`<td key=${kind} class="number">${cell(kind === "idle" ? lane.idle : lane.strips[kind])}</td>`)}
      <td class="small wrap">${Object.keys(MARKS).map((kind) => [kind, lane.marks.filter((mark) => mark.kind === kind).reduce((sum, mark) => sum + mark.count, 0)]).filter(([, number]) => number).map(([kind, number]) => `${number} ${MARKS[kind][number === 1 ? 2 : 3]}`).join(", ") || "–"}</td></tr>`)}</tbody></table><//>`;
}

export function TimelineView({ account }) {
  const { data: runs, error: noRuns } = useData("/api/v1/runs?limit=200", 30000), { data: tenants, error: noTenants } = useData(account.role === "admin" ? "/api/v1/tenants?limit=1000" : null, 30000, getAll);
  const names = Object.fromEntries([...(runs?.runs ?? []).map((run) => [run.id, run.name]), ...(tenants ?? []).map((one) => [one.id, one.name])]);
  return html`<div class="bar"><h1>Timeline</h1><span class="muted">${account.role === "admin" ? "workers and tenants" : "workers and your runs; work of others without a name"}</span></div><${Problem} error=${noRuns ?? noTenants} /><${Timeline} account=${account} names=${names} />`;
}
