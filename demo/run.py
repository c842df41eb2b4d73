"""Four tenants train four policies at the same time on one resident model, and the demo says honestly who learned.

``python demo/run.py [--folder DIR]``. Exits 0 when every task's held-out reward rose by more than two standard errors
and lies above what one constant answer could earn; else 1. Ctrl-C ends everything that was started.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tasks import HELD_OUT, Task, tasks

import rookery
from rookery.errors import RookeryError
from rookery.server.embedded import EmbeddedService
from rookery.settings import Settings
from rookery.telemetry.table import job_table

MODEL = "smollm2-135m-instruct"
REFRESH_SECONDS = 1.0
"""Between two pictures of the live table."""


@dataclass
class Run:
    task: Task
    key: str
    client: rookery.Client
    job: rookery.Job


@dataclass(frozen=True)
class Verdict:
    """What a task's two evaluations say."""

    before: float
    after: float
    error: float
    """Standard error of the difference, the prompts being the same."""
    constant: float

    @property
    def learned(self) -> bool:
        return self.after - self.before > 2 * self.error and self.after > self.constant


def spec_of(task: Task) -> dict[str, Any]:
    """All but the environment."""
    return {
        "base_model": MODEL,
        "policies": {"main": {"rank": 16, "optimizer": {"lr": 5.0e-4}}},
        "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 6, "max_staleness": 2},
        "sampling": {"temperature": 1.0, "max_tokens": task.max_tokens},
        "evaluation": {"prompts": HELD_OUT},
        "stop": {"steps": task.steps},
    }


def tenant_key(url: str, admin_key: str, name: str) -> str:
    """A new tenant with a key of its own."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {admin_key}"}) as admin:
        tenant = admin.post("/api/v1/tenants", json={"name": name}).raise_for_status().json()["id"]
        key: str = admin.post(f"/api/v1/tenants/{tenant}/keys", json={}).raise_for_status().json()["key"]
    return key


def judge(task: Task, job: rookery.Job) -> tuple[Verdict, Any, Any]:
    """The verdict, and one held-out prompt's results before and after: the one that gained most."""
    first, last = job.evaluations()[0], job.evaluations()[-1]
    pairs = [(a, b) for a, b in zip(first.held_out, last.held_out, strict=True) if not a["error"] and not b["error"]]
    before, after = [a["reward"] for a, _ in pairs], [b["reward"] for _, b in pairs]
    gains = [b - a for a, b in zip(before, after, strict=True)]
    mean = math.fsum(gains) / len(gains)
    error = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
    constant = task.constant([a["prompt"] for a, _ in pairs])
    shown = max(range(len(pairs)), key=lambda i: gains[i])
    verdict = Verdict(math.fsum(before) / len(before), math.fsum(after) / len(after), error, constant)
    return verdict, pairs[shown][0], pairs[shown][1]


def picture(runs: list[Run], seconds: float) -> Group:
    views = [{**run.job.show(), "name": f"{run.task.tenant}/{run.task.name}"} for run in runs]
    title = f"Rookery: {len(runs)} tenants, one {MODEL}, {seconds:.0f} s"
    return Group(job_table(views, title=title), Text("Ctrl-C ends everything", style="dim"))


def watch(runs: list[Run], out: Console, began: float) -> None:
    """The live table until every job has ended, or stopped by itself."""
    shown = 0.0
    with Live(console=out, auto_refresh=False) as live:
        while True:
            states = [run.job.show()["state"] for run in runs]
            over = all(state not in ("queued", "running") for state in states)
            if out.is_terminal or over or time.monotonic() - shown > 20:
                shown = time.monotonic()
                view = picture(runs, shown - began)
                live.update(view, refresh=True)
                if not out.is_terminal and not over:
                    out.print(view)
            if over:
                return
            time.sleep(REFRESH_SECONDS)


def report(runs: list[Run], out: Console, folder: Path) -> bool:
    """Each task's figures and a sample; whether all have learned."""
    table = Table(title="Held-out prompts, temperature 1", title_justify="left", title_style="bold")
    for column in ("task", "before", "after", "gain / its standard error", "best constant answer", "learned"):
        table.add_column(column, justify="left" if column == "task" else "right")
    samples, learned = [], []
    for run in runs:
        view = run.job.show()
        if view["state"] != "completed":
            out.print(f"{run.task.name}: {view['state']}: {view['reason']}", style="bold red", markup=False)
            learned.append(False)
            continue
        verdict, before, after = judge(run.task, run.job)
        learned.append(verdict.learned)
        gain = verdict.after - verdict.before
        table.add_row(
            run.task.name, f"{verdict.before:.3f}", f"{verdict.after:.3f}", f"{gain:+.3f} / {verdict.error:.3f}",
            f"{verdict.constant:.3f}", "[green]yes" if verdict.learned else "[red]NO",
        )  # fmt: skip
        samples.append((run.task, before, after))
        run.job.adapter().download(folder / "adapters" / run.task.name)
    out.print(table)
    for task, before, after in samples:
        out.print(f"\n{task.name}", style="bold", end=" ")
        out.print(f"({task.what})", style="dim", markup=False)
        out.print(f"  before {before['reward']:.1f}: {before['answer']!r}", markup=False)
        out.print(f"  after  {after['reward']:.1f}: {after['answer']!r}", markup=False)
    return all(learned)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    parser.add_argument("--port", type=int, default=0, help="where the service listens; 0 takes a free port")
    arguments = parser.parse_args()
    out = Console()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            settings = Settings.load(data=folder / "service", port=arguments.port, models=MODEL)
            service = stack.enter_context(EmbeddedService(settings))
            out.print(f"The service is up at {service.url}; its data: {settings.data}", markup=False, highlight=False)
            runs = []
            for task in tasks(folder):
                key = tenant_key(service.url, service.key, task.tenant)
                client = stack.enter_context(rookery.Client(service.url, key))
                job = client.train(environment=task.environment, name=task.name, **spec_of(task))
                runs.append(Run(task, key, client, job))
            watch(runs, out, began)
            learned = report(runs, out, folder)
            keys = folder / "service" / "admin.key"
    except KeyboardInterrupt:
        out.print("\nstopped; nothing runs any more")
        return 130
    except RookeryError as error:
        out.print(str(error), style="bold red", markup=False)
        return 1
    seconds = time.monotonic() - began
    out.print(f"\n{'All four have learned' if learned else 'NOT ALL HAVE LEARNED'} in {seconds:.0f} s.", style="bold")
    out.print(
        f"The adapters are PEFT folders: {folder / 'adapters'}\n"
        f"Next: rookery serve --data {folder / 'service'}   then chat with one, by its tenant's key:\n"
        + "".join(f"      ROOKERY_KEY={run.key} rookery chat {run.task.name}\n" for run in runs)
        + "      or write a job.yaml of your own (docs/job.md) and: rookery run job.yaml",
        markup=False,
        highlight=False,
        soft_wrap=True,  # lines to copy stay lines
    )
    assert keys.exists()
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
