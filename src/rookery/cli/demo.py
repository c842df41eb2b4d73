"""``rookery demo``: four tenants train four policies at the same time on one resident model.

The demo passes (exit code 0) when the held-out reward of every task rose by more than two standard errors and is higher
than the best constant reply could earn. Ctrl-C stops everything that was started. The tasks are in
:mod:`rookery.examples`; each can be run alone.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rookery.cli.options import COMPLETED, FAILED, INTERRUPTED, path_option
from rookery.cli.output import console, is_terminal
from rookery.client import Client, Job, Record
from rookery.environments.base import Environment
from rookery.errors import RookeryError, Unavailable, count_of
from rookery.settings import Settings
from rookery.telemetry.table import job_table

MODEL = "smollm2-135m-instruct"
HELD_OUT = 64
"""Held-out prompts of each task, the same before and after."""
REFRESH_SECONDS = 1.0
"""Interval between updates of the live table."""
PIPED_SECONDS = 20.0
"""Interval between updates where the output is not a terminal."""
PATIENCE_SECONDS = 60.0
"""A service may be silent for so long: right after an installation the disk is busy with what was installed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One tenant's job. ``best_constant`` computes the highest mean reward of one constant reply on given prompts."""

    tenant: str
    name: str
    description: str
    environment: dict[str, Any] | Environment
    max_tokens: int
    steps: int
    best_constant: Callable[[list[Any]], float]

    def spec(self) -> dict[str, Any]:
        """The job's fields except the environment."""
        return {
            "name": self.name,
            "base_model": MODEL,
            # The last steps are small: at a constant rate one of them can undo what an evaluation is to show.
            "policies": {"main": {"rank": 16, "optimizer": {"lr": 6.0e-4, "schedule": "cosine"}}},
            "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 6, "max_staleness": 2},
            "sampling": {"temperature": 1.0, "max_tokens": self.max_tokens},
            "evaluation": {"prompts": HELD_OUT},
            "stop": {"steps": self.steps},
        }


@dataclass(frozen=True)
class TaskRun:
    task: Task
    key: str
    job: Job


@dataclass(frozen=True)
class Comparison:
    """A task's first and last evaluation, paired by prompt."""

    before: float
    after: float
    error: float
    """Standard error of the mean difference."""
    constant: float
    """Reward of the best constant reply."""
    example: tuple[Any, Any]
    """The results of the prompt that gained most."""

    @property
    def learned(self) -> bool:
        return self.after - self.before > 2 * self.error and self.after > self.constant


def compare(task: Task, evaluations: Sequence[Record]) -> Comparison | None:
    """None where fewer than two held-out prompts have an episode that completed in both evaluations."""
    first, last = evaluations[0].held_out, evaluations[-1].held_out
    pairs = [(a, b) for a, b in zip(first, last, strict=True) if not a["error"] and not b["error"]]
    if len(pairs) < 2:
        return None
    gains = [b["reward"] - a["reward"] for a, b in pairs]
    return Comparison(
        before=statistics.fmean(a["reward"] for a, _ in pairs),
        after=statistics.fmean(b["reward"] for _, b in pairs),
        error=statistics.stdev(gains) / math.sqrt(len(gains)),
        constant=task.best_constant([a["prompt"] for a, _ in pairs]),
        example=max(pairs, key=lambda pair: pair[1]["reward"] - pair[0]["reward"]),
    )


def demo(
    folder: Annotated[Path | None, path_option(help="The folder for data and adapters; a new one in runs/.")] = None,
    port: Annotated[int, typer.Option(help="The port of the service; 0 takes a free one.", min=0, max=65535)] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Serve the page afterwards until Ctrl-C.")] = False,
) -> None:
    """Train four policies of four tenants at once, and check on held-out prompts that each has learned."""
    from rookery.examples import contacts, phone_book, shopping, slow_clerk

    tasks = [module.TASK for module in (contacts, shopping, phone_book, slow_clerk)]
    raise typer.Exit(run_tasks(tasks, folder, port, keep))


def run_tasks(tasks: Sequence[Task], folder: Path | None = None, port: int = 0, keep: bool = False) -> int:
    """Run ``tasks`` at the same time on a service for them alone. With ``keep`` it serves its page afterwards until the
    user interrupts it. Returns the exit code."""
    from rookery.server.launcher import EmbeddedService

    out = console()
    folder = folder if folder is not None else Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    settings = Settings.alone(data=folder / "service", port=port, models=MODEL)
    try:
        with ExitStack() as stack:
            service = stack.enter_context(EmbeddedService(settings))
            out.print(f"The service is up at {service.url}; its data: {settings.data}", markup=False, highlight=False)
            admin = stack.enter_context(Client(service.url, service.key))
            _show_link(admin, out, "Watch it on its page")
            runs = []
            for task in tasks:
                admin.add_tenant(task.tenant)
                key = admin.add_key(task.tenant).key
                client = stack.enter_context(Client(service.url, key))
                runs.append(TaskRun(task, key, client.train(environment=task.environment, **task.spec())))
            _watch(runs, out, start)
            learned = _report(runs, out, folder)
            if keep:
                _serve_page(admin, out)
    except KeyboardInterrupt:
        out.print("\nstopped; nothing is running any more")
        return INTERRUPTED
    except RookeryError as error:
        out.print(str(error), style="bold red", markup=False)
        return FAILED
    seconds = time.monotonic() - start
    out.print(f"\n{'All have learned' if learned else 'NOT ALL HAVE LEARNED'} in {seconds:.0f} s.", style="bold")
    out.print(
        f"The adapters are PEFT folders: {folder / 'adapters'}\n"
        f"Next: rookery serve --data {settings.data}   then rookery open (the page), or chat with a policy,"
        f" with its tenant's key:\n"
        + "".join(f"      ROOKERY_KEY={run.key} rookery chat {run.task.name}\n" for run in runs)
        + "      or write a job.yaml (docs/job.md) and: rookery run job.yaml",
        markup=False,
        highlight=False,
        soft_wrap=True,  # lines to copy stay lines
    )
    return COMPLETED if learned else FAILED


def _show_link(admin: Client, out: Console, title: str) -> None:
    """Print ``title`` and a link that signs one browser in."""
    out.print(
        f"{title}; this opens it, signed in, within a minute:\n      {admin.sign_in_link()}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _serve_page(admin: Client, out: Console) -> None:
    """Wait until the user interrupts it."""
    _show_link(admin, out, f"\nThe page of these runs: {admin.url} (Ctrl-C ends it)")
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def view_of(job: Job, patience: float = PATIENCE_SECONDS, pause: float = REFRESH_SECONDS) -> Record:
    """The job now. A service that does not answer is asked again for ``patience`` seconds."""
    began = time.monotonic()
    while True:
        try:
            return job.show()
        except Unavailable:
            if time.monotonic() - began > patience:
                raise
        time.sleep(pause)


def _watch(runs: Sequence[TaskRun], out: Console, start: float) -> None:
    """Show the live table until every job has ended or paused."""
    shown = -math.inf
    with Live(console=out, auto_refresh=False) as live:
        while True:
            views = [{**view_of(run.job), "name": f"{run.task.tenant}/{run.task.name}"} for run in runs]
            done = all(view["state"] not in ("queued", "running") for view in views)
            now = time.monotonic()
            if is_terminal() or done or now - shown > PIPED_SECONDS:
                shown = now
                title = f"Rookery: {count_of(len(runs), 'tenant')}, one {MODEL}, {now - start:.0f} s"
                picture = Group(Text(title, "bold"), "", job_table(views), "", Text("Ctrl-C stops everything", "dim"))
                live.update(picture, refresh=True)
                if not is_terminal() and not done:
                    out.print(picture)
            if done:
                return
            time.sleep(REFRESH_SECONDS)


def _report(runs: Sequence[TaskRun], out: Console, folder: Path) -> bool:
    """Print each task's results and an example, and download the adapters; returns whether all have learned."""
    out.print()
    table = Table(title="Held-out prompts, temperature 1", title_justify="left", title_style="bold")
    for column in ("task", "before", "after", "gain / its standard error", "best constant reply", "learned"):
        table.add_column(column, justify="left" if column == "task" else "right")
    results = []
    for run in runs:
        view = run.job.show()
        if view.state != "completed":
            out.print(f"{run.task.name}: {view.state}: {view.reason}", style="bold red", markup=False)
            continue
        found = compare(run.task, run.job.evaluations())
        if found is None:
            out.print(f"{run.task.name}: held-out episodes failed: rookery jobs logs has the reason", style="bold red")
            continue
        results.append((run.task, found))
        numbers = f"{found.before:.3f}", f"{found.after:.3f}", f"{found.after - found.before:+.3f} / {found.error:.3f}"
        verdict = "[green]yes" if found.learned else "[red]NO"
        table.add_row(run.task.name, *numbers, f"{found.constant:.3f}", verdict)
        run.job.adapter().download(folder / "adapters" / run.task.name)
    out.print(table)
    for task, found in results:
        out.print(f"\n{task.name}", style="bold", end=" ")
        out.print(f"({task.description})", style="dim", markup=False)
        for when, result in zip(("before", "after "), found.example, strict=True):
            out.print(f"  {when} {result['reward']:.1f}: {result['answer']!r}", markup=False)
    return len(results) == len(runs) and all(found.learned for _, found in results)
