"""Small line charts as SVG, with nothing but the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 170, 40, 48
"""Margins of the plot; names of lines are at the right."""
COLOURS = ("#1f6fb4", "#c46a1b", "#3a9e5b", "#7e57c2", "#b03a48")
GREY = "#777777"
LABEL = 15.0
"""Height of a line of text."""


@dataclass(frozen=True)
class Line:
    """Points of one line, with standard errors where they are known and a text at each point where it is given."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] = ()
    labels: Sequence[str] = field(default=())
    joined: bool = True
    """False draws the points alone."""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str, x_name: str, y_name: str, lines: Sequence[Line], levels: Mapping[str, float] | None = None
) -> str:
    """An SVG with lines and, dashed, horizontal levels. Raises ValueError where there is no point."""
    levels = levels or {}
    xs = [point[0] for line in lines for point in line.points]
    ys = [point[1] for line in lines for point in line.points] + list(levels.values())
    ys += [y + error for line in lines for (_, y), error in zip(line.points, line.errors, strict=False)]
    if not xs:
        raise ValueError("a chart has at least one point")
    left, right = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    low, high = min(0.0, *ys), max(ys) * 1.05 if max(ys) > 0 else 1.0
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(value: float) -> float:
        return LEFT + (value - left) / (right - left) * plot_width

    def up(value: float) -> float:
        return TOP + (high - value) / (high - low) * plot_height

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for value in ticks(low, high):
        parts.append(f'<path d="M{LEFT} {up(value):.1f}H{LEFT + plot_width}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(left, right):
        below = f'x="{across(value):.1f}" y="{TOP + plot_height + 18}"'
        parts.append(f'<text {below} text-anchor="middle">{value:g}</text>')
    middle = LEFT + plot_width / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>')
    centre = TOP + plot_height / 2
    turned = f'transform="rotate(-90 16 {centre})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{centre}" {turned}>{escape(y_name)}</text>')
    names: list[tuple[float, str, str]] = []
    for name, value in levels.items():
        dashes = f'stroke="{GREY}" stroke-dasharray="5 4"'
        parts.append(f'<path d="M{LEFT} {up(value):.1f}H{LEFT + plot_width}" {dashes}/>')
        names.append((up(value), f"{name} {value:.2f}", GREY))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        at = [(across(a), up(b)) for a, b in line.points]
        for (place, _), (_, value), error in zip(at, line.points, line.errors, strict=False):
            parts.append(f'<path d="M{place:.1f} {up(value - error):.1f}V{up(value + error):.1f}" stroke="{colour}"/>')
        if line.joined:
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in at)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in at]
        for (a, b), label in zip(at, line.labels, strict=False):
            parts.append(f'<text x="{a + 6:.1f}" y="{b - 6:.1f}" fill="{colour}" font-size="11">{escape(label)}</text>')
        names.append((at[-1][1], line.name, colour))
    text_at = -math.inf
    for wanted, text, colour in sorted(names):
        text_at = max(wanted + 4, text_at + LABEL)
        shown = f'x="{LEFT + plot_width + 8}" y="{text_at:.1f}"'
        parts.append(f'<text {shown} fill="{colour}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
