// One chart of a run: lines over steps with a cursor that all charts share, zoom by dragging, and a click that opens a step.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { NumberField, html, useTheme } from "./parts.js";
import { counted, isNumber, number, smooth } from "./format.js";

const HEIGHT = 210;
const CLICK_PIXELS = 4; // a shorter drag is a click
const STEPS_APART = Array.from({ length: 9 }, (_, at) => [1, 2, 5].map((first) => first * 10 ** at)).flat(); // between two marks of the axis

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A little more than the values take; a flat line is in the middle, or at the bottom where it is 0. A share goes from 0 to the `most` that it can be. */
function rangeOf(low, high, most) {
  if (most) return [0, 1.02 * most];
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = 0.06 * (high - low);
  return [low >= 0 && low < high / 3 ? 0 : low - room, high + room];
}

/** What the charts of a view share: smoothing, and the steps that they show, which dragging chooses too. */
export function Axis({ steps, weight, onWeight, zoom, onZoom }) {
  const first = steps[0] ?? 0, last = steps.at(-1) ?? 0, [from, to] = zoom ? [Math.ceil(zoom[0]), Math.floor(zoom[1])] : [first, last];
  const limit = (text, otherwise) => (text === "" ? otherwise : Math.min(last, Math.max(first, Number(text))));
  const choose = (change) => onZoom((now) => {
    const [low, high] = change(now ? [Math.ceil(now[0]), Math.floor(now[1])] : [first, last]);
    return low > high || (low <= first && high >= last) ? null : [low, high];
  });
  return html`<label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${weight} aria-valuetext=${weight ? `weight of the past ${weight.toFixed(2)}` : "off"} onInput=${(event) => onWeight(Number(event.target.value))} /> <span class="small">${weight ? `weight of the past ${weight.toFixed(2)}` : "off"}</span></label>
    <${NumberField} label="steps from" value=${from} min=${first} max=${last} onChoose=${(text) => choose(([, high]) => [limit(text, first), high])} /><${NumberField} label="to" value=${to} min=${first} max=${last} onChoose=${(text) => choose(([low]) => [low, limit(text, last)])} />
    ${zoom && html`<button onClick=${() => onZoom(null)}>Show all steps</button>`}`;
}

/** `lines`: [{label, values, dashed, dots, raw}] with a value for each of `steps`; `zoom` is [from, to] or null. */
export function Chart({ title, unit = "", steps, lines, weight = 0, zoom, onZoom, onStep, most, digits = 3, show = (value) => number(value, digits) }) {
  const box = useRef(null), plot = useRef(null), hooks = useRef({});
  const [at, setAt] = useState(null), theme = useTheme();
  hooks.current = { onZoom, onStep, steps };
  const shape = JSON.stringify([lines.map((line) => [line.label, line.dashed, line.dots]), title, unit, most]);

  useLayoutEffect(() => { // at once, as a page that is printed waits for nothing
    const here = box.current;
    const axis = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const options = {
      width: here.clientWidth || 400,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "run", setSeries: false }, drag: { x: true, y: false, dist: CLICK_PIXELS, setScale: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, most) } },
      axes: [{ ...axis, size: 32, incrs: STEPS_APART }, { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(6))).replace(/^(-?\d+)000$/, "$1k")) }],
      series: [{}, ...lines.map((line, place) => ({
        label: line.label, stroke: color(`--c${place % 6}`), width: line.dashed ? 1.3 : 2, spanGaps: true,
        dash: line.dashed ? [6, 5] : undefined, points: { fill: color(`--c${place % 6}`), show: line.dots ?? ((u, place) => u.data[place].filter(isNumber).length < 3), size: line.dots ? 8 : 5 }, paths: line.dots ? () => null : undefined,
      }))],
      hooks: {
        setCursor: [(u) => setAt(u.cursor.idx ?? null)],
        setSelect: [(u) => {
          if (u.select.width < CLICK_PIXELS) return;
          const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (hooks.current.steps.some((step) => step >= range[0] && step <= range[1])) hooks.current.onZoom?.(range);
        }],
      },
    };
    const u = new uPlot(options, [[], ...lines.map(() => [])], here);
    plot.current = u;
    let down = null;
    u.over.addEventListener("mousedown", (event) => { down = event.clientX; });
    u.over.addEventListener("click", (event) => {
      if (down !== null && Math.abs(event.clientX - down) < CLICK_PIXELS && isNumber(u.cursor.idx)) hooks.current.onStep?.(hooks.current.steps[u.cursor.idx]);
    });
    u.over.addEventListener("dblclick", () => hooks.current.onZoom?.(null));
    const watch = new ResizeObserver(() => u.setSize({ width: here.clientWidth, height: HEIGHT }));
    watch.observe(here);
    return () => { watch.disconnect(); u.destroy(); };
  }, [shape, theme]);

  const shown = lines.map((line) => (line.raw || !weight ? line.values : smooth(line.values, weight)));
  useLayoutEffect(() => {
    const u = plot.current;
    u.setData([steps, ...shown.map((values) => values.map((value) => (isNumber(value) ? value : null)))], false);
    const low = steps[0] ?? 0, high = steps[steps.length - 1] ?? 1;
    u.setScale("x", zoom ? { min: zoom[0], max: zoom[1] } : { min: low === high ? low - 1 : low, max: low === high ? high + 1 : high });
  });

  const until = zoom ? steps.findLastIndex((step) => step <= zoom[1]) : steps.length - 1; // the newest step that is shown
  const last = (values) => values.findLast((value, place) => place <= until && isNumber(value));
  const value = (values) => (at === null ? last(values) : values[at]);
  const summary = lines.map((line, place) => `${line.label} ${show(last(shown[place]))}`).join(", ");
  return html`<section class="panel chart">
    <h2 class="sub">${title} ${unit && html`<span class="unit">${unit}</span>`}</h2>
    <div class="plot" ref=${box} role="img" aria-label=${`${title} over ${counted(steps.length, "step")}; at step ${steps[until]}: ${summary}`}></div>
    <div class="legend"><span>step <b>${steps[at ?? until]}</b></span>
      ${lines.map((line, place) => html`<span><i class=${`swatch s${place % 6}`}></i>${line.label} <b>${show(value(line.raw ? line.values : shown[place]))}</b></span>`)}
    </div>
  </section>`;
}
