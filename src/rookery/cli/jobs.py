"""``rookery jobs …``: look at jobs and steer them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rookery.cli.common import (
    ENDINGS,
    INTERRUPTED,
    Data,
    Json,
    Key,
    Url,
    client_of,
    console,
    figures,
    print_json,
    time_of,
)
from rookery.client import Job
from rookery.telemetry.table import job_list, job_table, sparkline

app = typer.Typer(help="Look at jobs and steer them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name where only one is called so.")]

STEP_FIGURES = ("reward", "loss", "kl", "entropy", "staleness_mean", "logp_diff_mean", "seconds/train")
"""What one line of a step shows where a row has it; --json shows all."""


@app.command("list")
def list_jobs(url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """All jobs of this key's tenant."""
    with client_of(url, key, data) as client:
        views = client.views()
    if json:
        for view in views:
            print_json(view)
    elif views:
        console().print(job_list(views))
    else:
        console().print("no jobs yet; rookery run job.yaml submits one")


@app.command("show")
def show(job: Name, url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """One job: where it stands, its policies, what was counted, its evaluations."""
    with client_of(url, key, data) as client:
        found = client.job(job)
        view, evaluations = found.show(), found.evaluations()
    if json:
        print_json({**view, "evaluations": evaluations})
        return
    out = console()
    out.print(job_table([view]))
    lines: list[tuple[str, Any]] = [
        ("id", view.id),
        ("base model", view.base_model),
        ("reason", view.reason),
        ("submitted", time_of(view.created)),
        ("started", time_of(view.started)),
        ("finished", time_of(view.finished)),
        ("tokens", f"{view.tokens:,}"),
        ("rewards", sparkline(view.rewards, 64)),
        *cost_lines(view.cost),
        *((f"policy {p.name}", f"version {p.version}, rank {p.rank}, alpha {p.alpha:g}") for p in view.policies),
        *((name.replace("_", " "), count) for name, count in view.counters.items() if count and name != "tokens"),
        *((f"evaluation of version {e.version}", f"{e.mean:.3f} ± {e.stderr:.3f} ({e.prompts} prompts)")
          for e in evaluations),
    ]  # fmt: skip
    for name, value in lines:
        if value not in ("", None):
            out.print(f"{name:<28} {value}", markup=False)


@app.command("pause")
def pause(job: Name, url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """Stop working on a job until it is resumed; nothing is lost."""
    _act("pause", job, url, key, data, json)


@app.command("resume")
def resume(job: Name, url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """Let a paused job go on."""
    _act("resume", job, url, key, data, json)


@app.command("cancel")
def cancel(job: Name, url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """End a job for good; its versions stay."""
    _act("cancel", job, url, key, data, json)


@app.command("logs")
def logs(
    job: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    limit: Annotated[int, typer.Option(help="How many events to show.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """What happened to a job, then its steps; with -f the exit code says how it ended."""
    with client_of(url, key, data) as client:
        found = client.job(job)
        for event in found.events(limit):
            if json:
                print_json({"event": event})
            else:
                console().print(f"{time_of(event.time)}  {event.kind}: {event.text}", markup=False)
        if not follow:
            for row in found.metrics(follow=False):
                print_step(row, json)
            return
        try:
            code = _follow(found, json)
        except KeyboardInterrupt:
            code = INTERRUPTED
    raise typer.Exit(code)


def _follow(job: Job, json: bool) -> int:
    """Until the job has ended; the exit code that says how."""
    state = ""
    for kind, data in job.follow():
        if kind == "metrics":
            print_step(data, json)
        elif kind in ("job", "end"):
            if json:
                print_json({"job": data})
            else:
                console().print(
                    f"{job.name} is {data.state}" + (f": {data.reason}" if data.reason else ""), markup=False
                )
            state = data.state
    return ENDINGS[state]


def print_step(row: dict[str, Any], json: bool) -> None:
    """A metrics row on one line."""
    if json:
        print_json({"metrics": row})
    else:
        console().print(f"step {row['step']:>5}  {figures(row, STEP_FIGURES)}", markup=False)


def _act(action: str, job: str, url: str | None, key: str | None, data: Any, json: bool) -> None:
    with client_of(url, key, data) as client:
        view = getattr(client.job(job), action)()
    if json:
        print_json(view)
    else:
        console().print(f"{view.name} is {view.state}" + (f": {view.reason}" if view.reason else ""), markup=False)


def cost_lines(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a job cost, where anything did; else how long workers computed for it."""
    lines = [("compute", f"{cost['seconds']:,.0f} s")] if cost["seconds"] else []
    if cost["cost"]:
        shares = f"{cost['reserved']:.4g} reserved, {cost['preemptible']:.4g} preemptible"
        lines += [
            ("cost", f"{cost['cost']:.4g} ({shares})"),
            ("tokens per price unit", f"{cost['tokens_per_unit']:,.0f}"),
        ]
        if cost["reserved_alone"] is not None:
            lines.append(("cost on reserved alone", f"{cost['reserved_alone']:.4g} (estimated)"))
    return lines
