"""``rookery jobs …``: list, show, follow, control and delete jobs. ``rookery uploads …``: list and delete uploads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from rookery.cli.options import ENDINGS, INTERRUPTED, Cli, console, figures, print_json, time_of, with_options
from rookery.client import Job
from rookery.telemetry.table import job_list, job_table, sparkline

app = typer.Typer(help="List, show, follow, control and delete jobs.", no_args_is_help=True)
uploads = typer.Typer(help="List and delete uploaded datasets and adapters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name where only one has it.")]

STEP_FIGURES = ("reward", "loss", "kl", "entropy", "staleness_mean", "logp_diff_mean", "seconds/train")
"""Metrics in the line of a step where its row has them; --json prints all."""

NOTICES = ("warning", "no_signal")
"""Kinds of events that the follower of a job sees as they come."""


@app.command("list")
@with_options
def list_jobs(cli: Cli) -> None:
    """All jobs of this key's tenant."""
    with cli.client() as client:
        views = client.views()
    if views or cli.json:
        cli.show_rows(views, lambda: job_list(views))
    else:
        console().print("no jobs yet; rookery run job.yaml submits one")


@app.command("show")
@with_options
def show(cli: Cli, job: Name) -> None:
    """One job: its progress, policies, counters and evaluations."""
    with cli.client() as client:
        found = client.job(job)
        view, evaluations = found.show(), found.evaluations()
    if cli.json:
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
        *((f"policy {p.name}", f"version {p.version}, " + (f"rank {p.rank}, alpha {p.alpha:g}" if p.rank else
           "all parameters")) for p in view.policies),
        *((name.replace("_", " "), count) for name, count in view.counters.items() if count and name != "tokens"),
        *((f"evaluation of version {e.version}", f"{e.mean:.3f} ± {e.stderr:.3f} ({e.prompts} prompts)")
          for e in evaluations),
    ]  # fmt: skip
    for name, value in lines:
        if value not in ("", None):
            out.print(f"{name:<28} {value}", markup=False)


@app.command("pause")
@with_options
def pause(cli: Cli, job: Name) -> None:
    """Pause a job until it is resumed; nothing is lost."""
    _act(cli, "pause", job)


@app.command("resume")
@with_options
def resume(cli: Cli, job: Name) -> None:
    """Resume a paused job."""
    _act(cli, "resume", job)


@app.command("cancel")
@with_options
def cancel(cli: Cli, job: Name) -> None:
    """End a job for good; its versions stay."""
    _act(cli, "cancel", job)


@app.command("delete")
@with_options
def delete(cli: Cli, job: Name) -> None:
    """Delete a job that has ended, with its versions and all its results."""
    with cli.client() as client:
        found = client.job(job)
        found.delete()
    cli.show({"deleted": found.id}, f"{found.name} ({found.id}) is deleted")


@app.command("logs")
@with_options
def logs(
    cli: Cli,
    job: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    limit: Annotated[int, typer.Option(help="How many events to show.", min=1, max=1000)] = 100,
) -> None:
    """A job's events, then its steps; with -f the exit code says how it ended."""
    with cli.client() as client:
        found = client.job(job)
        events = found.events(limit)
        for event in events:
            cli.show({"event": event}, f"{time_of(event.time)}  {event.kind}: {event.text}")
        if not follow:
            for row in found.metrics(follow=False):
                print_step(cli, row)
            return
        try:
            code = _follow(cli, found, Notices(cli, found, console(), shown=events))
        except KeyboardInterrupt:
            code = INTERRUPTED
    raise typer.Exit(code)


@uploads.command("list")
@with_options
def list_uploads(cli: Cli) -> None:
    """The datasets, inline rows of jobs too, and adapters of this key's tenant."""
    with cli.client() as client:
        for row in client.uploads():
            cli.show(row, f"{row.hash}  {row.kind:<7}  {time_of(row.created)}  {row.size:,} bytes")


@uploads.command("delete")
@with_options
def delete_upload(cli: Cli, hash: Annotated[str, typer.Argument(metavar="HASH")]) -> None:
    """Delete an upload that no job uses which has not ended."""
    with cli.client() as client:
        client.delete_upload(hash)
    cli.show({"deleted": hash}, f"{hash} is deleted")


def _follow(cli: Cli, job: Job, notices: Notices) -> int:
    """Follow a job until it has ended; returns the exit code of how it ended."""
    state = ""
    for kind, data in job.follow():
        if kind != "heartbeat":
            notices.print_new()
        if kind == "metrics":
            print_step(cli, data)
        elif kind in ("job", "end"):
            cli.show({"job": data}, _state_line(job.name, data))
            state = data.state
    return ENDINGS[state]


def print_step(cli: Cli, row: dict[str, Any]) -> None:
    """A metrics row on one line."""
    cli.show({"metrics": row}, f"step {row['step']:>5}  {figures(row, STEP_FIGURES)}")


class Notices:
    """The events of a followed job that its owner should read: warnings about its spec, and steps without a signal."""

    def __init__(self, cli: Cli, job: Job, out: Console, shown: Iterable[Mapping[str, Any]] = ()) -> None:
        """``shown`` were printed already."""
        self._cli, self._job, self._out = cli, job, out
        self._shown = {(event["time"], event["text"]) for event in shown}

    def print_new(self) -> None:
        """Print those that were not printed yet, oldest first."""
        for event in self._job.events():
            if event.kind in NOTICES and (event.time, event.text) not in self._shown:
                self._shown.add((event.time, event.text))
                if self._cli.json:
                    print_json({"event": event})
                else:
                    self._out.print(f"{event.kind.replace('_', ' ')}: {event.text}", markup=False, style="yellow")


def _act(cli: Cli, action: str, job: str) -> None:
    with cli.client() as client:
        view = getattr(client.job(job), action)()
    cli.show(view, _state_line(view.name, view))


def _state_line(name: str, view: Any) -> str:
    return f"{name} is {view.state}" + (f": {view.reason}" if view.reason else "")


def cost_lines(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A job's compute time, and its cost where workers have a price."""
    lines = [("compute", f"{cost['seconds']:,.0f} s")] if cost["seconds"] else []
    if cost["cost"]:
        shares = f"{cost['reserved']:.4g} reserved, {cost['preemptible']:.4g} preemptible"
        lines += [
            ("cost", f"{cost['cost']:.4g} ({shares})"),
            ("tokens per price unit", f"{cost['tokens_per_unit']:,.0f}"),
        ]
    return lines
