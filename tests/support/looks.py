"""How a page looks, for tests of all its views: nothing is cut or covered, contrast is enough, rules are kept."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

AXE = """async () => (await axe.run()).violations.map((one) => [one.id, one.nodes.map((node) => node.html)])"""


def rules_broken(page: Any) -> list[Any]:
    """The rules of axe-core that the page breaks (WCAG 2 A and AA, and good practice), with the elements."""
    if not page.evaluate("'axe' in window"):
        page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found: list[Any] = page.evaluate(AXE)
    return found


TOOLS = """
const shown = (one) => one.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && !one.closest(".skip");
const texts = function* (root) {
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (node.data.trim() && shown(node.parentElement)) yield node;
  }
};
const rects = (node) => { const range = document.createRange(); range.selectNodeContents(node); return [...range.getClientRects()]; };
const scrolls = (one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX) && one.scrollWidth > one.clientWidth;
const scroller = (one) => { for (; one && one !== document.documentElement; one = one.parentElement) if (scrolls(one)) return one; return null; };
const CONTROLS = "a[href], button:not(:disabled), input:not(:disabled), select:not(:disabled), textarea:not(:disabled), summary, [tabindex='0']";
const controls = () => [...document.querySelectorAll(CONTROLS)].filter(shown);
const about = (one) => one.outerHTML.slice(0, 160);
"""  # noqa: E501

CUT = f"""() => {{ {TOOLS}
  const found = [], width = document.documentElement.clientWidth;
  for (const node of texts(document.body)) {{
    const one = node.parentElement, box = one.closest(".panel, .notice, .message, .badge, button, .button, td, th, dd");
    if (scroller(one)) continue;
    for (const rect of rects(node)) {{
      const edge = box?.getBoundingClientRect();
      if (rect.right > width + 1 || rect.left < -1) found.push(["outside of the window", about(one)]);
      else if (edge && (rect.right > edge.right + 1 || rect.left < edge.left - 1)) found.push(["outside of its box", about(box)]);
    }}
  }}
  for (const one of document.querySelectorAll("main *")) {{
    const style = getComputedStyle(one);
    if (style.overflowX === "hidden" && one.scrollWidth > one.clientWidth + 1 && shown(one) && one.innerText) found.push(["cut", about(one)]);
  }}
  for (const one of document.querySelectorAll(".scroll")) if (width >= 1360 && one.scrollWidth > one.clientWidth) found.push(["scrolls on a screen", one.ariaLabel]);
  if (document.documentElement.scrollWidth > width) found.push(["the window scrolls sideways", ""]);
  return found;
}}"""  # noqa: E501

COVERED = f"""() => {{ {TOOLS}
  const found = [], every = controls().filter((one) => !one.matches("[tabindex='0']"));
  const spots = every.map((one) => [...one.getClientRects()]);
  every.forEach((one, at) => every.slice(at + 1).forEach((other, further) => {{
    if (one.contains(other) || other.contains(one)) return;
    for (const a of spots[at]) for (const b of spots[at + 1 + further]) {{
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && tall > 4) found.push([about(one), about(other)]);
    }}
  }}));
  return found;
}}"""  # noqa: E501

CONTRAST = f"""() => {{ {TOOLS}
  const paint = document.createElement("canvas").getContext("2d", {{ willReadFrequently: true }});
  const rgba = (color) => {{
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  }};
  const over = ([r, g, b, a], under) => [r, g, b].map((one, at) => a * one + (1 - a) * under[at]);
  const ground = (one) => (one ? over(rgba(getComputedStyle(one).backgroundColor), ground(one.parentElement)) : [255, 255, 255]);
  const light = (color) => color.reduce((sum, one, at) => {{
    const part = one / 255, linear = part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    return sum + [0.2126, 0.7152, 0.0722][at] * linear;
  }}, 0);
  const ratio = (color, under) => {{ const [a, b] = [light(over(rgba(color), under)), light(under)].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); }};
  const found = new Map();
  const check = (what, color, under, least) => {{ const is = ratio(color, under); if (is < least - 0.005) found.set(what, is.toFixed(2)); }};
  for (const node of texts(document.body)) {{
    const one = node.parentElement, style = getComputedStyle(one), size = parseFloat(style.fontSize);
    if (one.closest(":disabled, option, svg")) continue;
    check(about(one), style.color, ground(one), size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5);
  }}
  for (const one of document.querySelectorAll("[placeholder]")) if (shown(one)) check(`placeholder of ${{about(one)}}`, getComputedStyle(one, "::placeholder").color, ground(one), 4.5);
  const box = document.querySelector(".tokens");
  const shades = ["masked", ...[0, 1, 2, 3, 4, 5].flatMap((at) => [`lp${{at}}`, `v${{at}}`]), ...[1, 2, 3, 4, 5].flatMap((at) => [`gapp${{at}}`, `gapn${{at}}`])];
  for (const name of box ? shades : []) {{
    const token = box.appendChild(document.createElement("span"));
    token.className = `token ${{name}}`;
    check(token.className, getComputedStyle(token).color, ground(token), 4.5);
    token.remove();
  }}
  const root = getComputedStyle(document.documentElement), panel = rgba(root.getPropertyValue("--panel"));
  for (const name of ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"]) check(`line ${{name}}`, root.getPropertyValue(name), panel, 3);
  for (const name of ["--muted", "--text"]) check(`text of a picture ${{name}}`, root.getPropertyValue(name), panel, 4.5);
  return [...found];
}}"""  # noqa: E501
