// Tokens that the pointer and the arrow keys walk through.
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "./parts.js";

/** `spans` have data-at from 0 to `count`, of which the keyboard begins after `first`; `about` gives the line under them for one, `hint` that for none. */
export function Walk({ spans, count, first = -1, about, hint = "", scrollTo }) {
  const [at, setAt] = useState(null), box = useRef(null), moved = useRef(false); // moved: by the keyboard, whose token has to be seen
  useEffect(() => { // a long prompt stands above what was sampled
    const start = scrollTo && box.current.querySelector(".token:not(.masked)");
    if (start) box.current.scrollTop = start.offsetTop - box.current.offsetTop - box.current.clientHeight / 2;
  }, [scrollTo]);
  useEffect(() => { // of tens of thousands of tokens, two change
    const found = at === null ? null : box.current.querySelector(`[data-at="${at}"]`);
    found?.classList.add("at");
    if (moved.current) found?.scrollIntoView({ block: "nearest" });
    moved.current = false;
    return () => found?.classList.remove("at");
  }, [at, spans]);
  const key = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    moved.current = true;
    setAt(Math.max(0, Math.min(count - 1, (at ?? first) + by)));
  };
  const point = (event) => { const found = event.target.dataset?.at; if (found !== undefined) setAt(Number(found)); };
  return html`<div class="tokens mono" ref=${box} tabindex="0" role="group" aria-label="Tokens; the arrow keys move from one to the next" onKeyDown=${key} onMouseOver=${point} onClick=${point}>${spans}</div>
    <p class="small mono about" aria-live="polite">${at === null || at >= count ? html`<span class="muted">${hint}</span>` : about(at)}</p>`;
}
