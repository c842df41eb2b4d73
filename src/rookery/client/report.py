"""A job as one HTML file that needs no service: curves, evaluations, newest episodes, events and settings.

It has no script and loads nothing, so it opens anywhere and stays as it is. Every text of the job is escaped.
"""

from __future__ import annotations

import html
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from rookery.client.job import Job
from rookery.errors import count_of
from rookery.telemetry.numbers import evaluation_cells, figure

EPISODES = 100
"""Newest episodes in a report: a reader looks at a few, and a file for a mail has some megabytes at most."""

EVENTS = 1000

WIDTH, HEIGHT = 420, 130
"""Of a chart, in pixels."""

CHARTS = (
    ("reward", "Reward", "mean of the step"),
    ("accuracy", "Preference", "share of pairs in which the chosen reply is preferred"),
    ("length_mean", "Reply length", "tokens"),
    ("entropy", "Entropy", "nats per token"),
    ("logp_diff_mean", "Log-probability gap", "nats per token, mean of |trainer − engine|"),
    ("zero_variance_share", "Groups without variance", "share"),
    ("loss", "Loss", "sum of the step"),
    ("staleness_mean", "Staleness", "optimizer steps"),
    ("seconds/generation", "Generation", "seconds per episode"),
    ("seconds/train", "Training", "seconds"),
)

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1300px; margin: 1.5rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #8884; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; }
pre, td { unicode-bidi: plaintext; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } svg { max-width: 100%; height: auto; }
svg path { fill: none; stroke: #3b74e0; stroke-width: 2; stroke-linecap: round; }
svg text { font-size: 11px; fill: #777; }
article { border: 1px solid #8886; border-radius: 6px; padding: .5rem .8rem; margin: .6rem 0; }
.muted { color: #777; }
"""


def reward_text(reward: float | None, policy: str = "") -> str:
    """``policy``: whose reward it is, where several have one."""
    whose = f" of {policy}" if policy else ""
    return "no reward" if reward is None else f"reward{whose} {reward:.4g}"


def outcome(episode: Mapping[str, Any]) -> str:
    """The reward of an episode; the state of one that failed, was dropped, or has not ended."""
    state, reward, policy = episode["state"], episode["reward"], episode.get("policy", "")
    return reward_text(reward, policy) if state == "done" or (reward is not None and state != "failed") else str(state)


def report(job: Job, episodes: int = EPISODES) -> str:
    """The file's text."""
    return "\n".join(_lines(job, episodes))


def _lines(job: Job, episodes: int) -> Iterator[str]:
    view, rows = job.show(), list(job.metrics(follow=False))
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{text(view.name)}</title>"
    yield '<meta name=viewport content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<style>{STYLE}</style><h1>{text(view.name)}</h1>"
    yield f"<p>{text(view.state)}{': ' + text(view.reason) if view.reason else ''} · {text(view.base_model)} ·"
    yield f" step {view.step} · {count_of(view.tokens, 'token', form=',')} sampled"
    yield f" · submitted {_time(view.created)} · {text(view.id)}</p>"
    several = len(view.spec.policies) > 1
    names = list(dict.fromkeys(row.get("policy") for row in rows))
    if several:
        yield "<h2>Policies</h2>" + _table(
            ("policy", "version", "step", "reward", "loss", "staleness"),
            [
                (one.name, f"{one.version} of {one.follows}" if one.follows else one.version,
                 *(figure(one.get(name), ".4g") for name in ("step", "reward", "loss", "staleness")))
                for one in view.policies
            ],
        )  # fmt: skip
    yield '<div class="charts">'
    for metric, title, unit in CHARTS:
        for name in names:
            mine = [row for row in rows if row.get("policy") == name]
            values = [row.get(metric) for row in mine]
            if any(_known(value) for value in values):
                whose = f" of {text(name)}" if name else ""  # where several train
                yield f"<figure><figcaption><b>{title}{whose}</b> <span class=muted>{unit}</span></figcaption>"
                yield chart([row["step"] for row in mine], values) + "</figure>"
    yield "</div>"
    if evaluations := job.evaluations():
        yield "<h2>Evaluations</h2>" + _table(
            (*["policy"] * several, "version", *evaluation_cells(evaluations[0])),
            [(*[one.policy] * several, one.version, *evaluation_cells(one).values()) for one in evaluations],
        )  # fmt: skip
    if found := job.episodes(limit=episodes):
        yield f"<h2>The newest {count_of(len(found), 'episode')}</h2>"
        for one in found:
            yield f"<article><b>{text(outcome(one))}</b> <span class=muted>group {one.ordinal}, version {one.version},"
            yield f" {count_of(one.tokens, 'token')}</span><pre class=muted>{text(one.prompt)}</pre>"
            for reply, policy in itertools.zip_longest(one.replies, one.get("speakers") or []):
                yield (f"<b>{text(policy)}</b>" if policy else "") + f"<pre>{text(reply)}</pre>"
            yield (f"<pre>{text(one.error)}</pre>" if one.error else "") + "</article>"
    yield "<h2>Events</h2>" + _table(
        ("time", "kind", "what happened"), [(_time(one.time), one.kind, one.text) for one in job.events(EVENTS)]
    )
    yield f"<h2>Settings</h2><pre>{text(view.spec)}</pre></html>"


def chart(steps: Sequence[int], values: Sequence[float | None]) -> str:
    """A line over the steps, with the smallest and the largest value; missing values are gaps, and a value between two
    of them is a dot."""
    known = [value for value in values if _known(value)]
    low, high = min(known), max(known)
    span, length = (high / 2 - low / 2) or 1.0, (steps[-1] - steps[0]) or 1
    path, begun = "", False
    for step, value in zip(steps, values, strict=True):
        if not _known(value):
            begun = False
            continue
        x, y = WIDTH * (step - steps[0]) / length, HEIGHT - 20 - (HEIGHT - 40) * ((value / 2 - low / 2) / span)
        path += f"L{x:.1f} {y:.1f}" if begun else f"M{x:.1f} {y:.1f}h.01"
        begun = True
    label = f"{low:.4g} to {high:.4g} over steps {steps[0]} to {steps[-1]}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<path d="{path}"/>'
        f'<text x="0" y="12">{high:.4g}</text><text x="0" y="{HEIGHT - 4}">{low:.4g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">step {steps[-1]}</text></svg>'
    )


def text(value: Any) -> str:
    """Any value as escaped text; mappings with a field per line."""
    if isinstance(value, Mapping):
        return "\n".join(f"{text(name)}: {text(inner)}" for name, inner in value.items())
    return html.escape(value if isinstance(value, str) else str(value))


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _known(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "–"
