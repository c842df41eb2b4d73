"""``rookery run job.yaml``: one job from its file to its end.

With a service (one that is configured, or that answers at the default address) the job is submitted there and followed;
Ctrl-C only stops following. Without one, a service is started for this run alone, with a data folder of its own that is
named after the job's content: the same file again goes on with what is unfinished there.
"""

from __future__ import annotations

import hashlib
import json as jsons
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from rookery.cli.common import (
    COMPLETED,
    ENDINGS,
    INTERRUPTED,
    Data,
    Json,
    Key,
    Url,
    console,
    print_json,
    settings_of,
)
from rookery.cli.jobs import print_step
from rookery.client import Client, Job
from rookery.errors import Unavailable
from rookery.settings import Settings
from rookery.spec.job import JobSpec
from rookery.spec.parsing import parse_job, read_job
from rookery.telemetry.table import job_table

RUNS = Path("runs")
"""Where runs without a service keep their data, below the working directory."""


def run(
    job_file: Annotated[Path, typer.Argument(help="The job: YAML or JSON.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, show the whole job and three prompts.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit to the running service and end.")] = False,
    adapter: Annotated[Path | None, typer.Option(help="Write the final PEFT adapter into this folder.")] = None,
    url: Url = None,
    key: Key = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Run one job to its end, on a running service if there is one, else on a service for this run alone."""
    raw = read_job(job_file)
    spec = parse_job(raw)
    settings = settings_of(url, key, data)
    with _sigterm_as_ctrl_c():
        client = _running_service(settings)
        if client is not None:
            with client:
                code = _on_service(client, raw, job_file.parent, dry_run, detach, adapter, json)
        elif detach:
            raise Unavailable(f"--detach needs a service, and none answers at {settings.base_url}: rookery serve")
        elif dry_run:
            with tempfile.TemporaryDirectory(prefix="rookery-") as gone, _embedded(settings, Path(gone), "") as own:
                code = _show_plan(own, raw, job_file.parent, json)
        else:
            folder = settings.data if data is not None else _own_folder(raw, spec)
            code = _alone(settings, folder, raw, spec, job_file.parent, adapter, json)
    raise typer.Exit(code)


def _on_service(
    client: Client, raw: dict[str, Any], folder: Path, dry_run: bool, detach: bool, adapter: Path | None, json: bool
) -> int:
    if dry_run:
        return _show_plan(client, raw, folder, json)
    job = client.submit(raw, folder=folder)
    follow = f"follow it with: rookery jobs logs -f {job.id}"
    if detach:
        _say(json, f"{job.name} is submitted; {follow}", job)
        return COMPLETED
    return _followed(job, json, adapter, f"{job.name} goes on; {follow}; end it with: rookery jobs cancel {job.id}")


def _alone(
    settings: Settings,
    data: Path,
    raw: dict[str, Any],
    spec: JobSpec,
    folder: Path,
    adapter: Path | None,
    json: bool,
) -> int:
    if not json:
        console().print(f"no service runs: starting one for this job; its data: {data}", markup=False)
    with _embedded(settings, data, spec.base_model) as own:
        job = _unfinished(own, spec) or own.submit(raw, folder=folder)
        kept = adapter if adapter is not None else data / "adapter"
        code = _followed(job, json, kept, "stopped; the same command goes on from the last step")
    if code == COMPLETED and not json:
        steps = f"rookery serve --data {data}, then: rookery chat {job.id} --data {data}"
        console().print(f"talk with it: {steps}", markup=False)
    return code


def _running_service(settings: Settings) -> Client | None:
    """The configured service, which must answer, or the one at the default address, if it does."""
    try:
        client = Client(settings=settings)
        client.health()
    except Unavailable:
        if settings.server.url:
            raise
        return None
    return client


@contextmanager
def _embedded(settings: Settings, folder: Path, models: str) -> Iterator[Client]:
    """A service of our own on a free port, in a thread; everything that it started ends with this."""
    from rookery.server.embedded import EmbeddedService

    own = settings.model_copy(update={"data": folder.absolute(), "port": 0, "models": models})
    with EmbeddedService(own) as service, Client(service.url, service.key, settings=own) as client:
        yield client


def _own_folder(raw: dict[str, Any], spec: JobSpec) -> Path:
    """Named after the job's content, so that two different jobs never meet in one folder."""
    content = jsons.dumps(raw, sort_keys=True, default=str).encode()
    return RUNS / f"{spec.name}-{hashlib.sha256(content).hexdigest()[:8]}"


def _unfinished(client: Client, spec: JobSpec) -> Job | None:
    """The job that an interrupted run of the same file left; one that had paused goes on."""
    for view in client.views():
        if view.name == spec.name and view.state not in ("completed", "failed", "cancelled"):
            job = client.job(view.id)
            if view.state == "paused":
                job.resume()
            return job
    return None


def _followed(job: Job, json: bool, adapter: Path | None, interrupted: str) -> int:
    """Shows the job until it ends or pauses by itself; answers the exit code."""
    try:
        view = _watch_json(job) if json else _watch(job, console())
    except KeyboardInterrupt:
        _say(json, interrupted, job)
        return INTERRUPTED
    if adapter is not None and view["state"] == "completed":
        job.adapter().download(adapter)
    if not json:
        _summary(job, view, adapter)
    return ENDINGS[view["state"]]


def _watch_json(job: Job) -> dict[str, Any]:
    view: dict[str, Any] = {}
    for kind, data in job.follow():
        if kind == "metrics":
            print_step(data, json=True)
        elif kind in ("job", "end"):
            view = data
            print_json({"job": data})
            if data.state == "paused":
                break
    return view


def _watch(job: Job, out: Console) -> dict[str, Any]:
    """A live table on a terminal, else a line per step."""
    view: dict[str, Any] = {}
    live = Live(console=out, auto_refresh=False, transient=True) if out.is_terminal else None
    with live if live is not None else nullcontext():
        for kind, data in job.follow():
            view = data if kind in ("job", "end") else view
            if live is not None:
                live.update(job_table([job.show()]), refresh=True)
            elif kind == "metrics":
                print_step(data, json=False)
            if view["state"] == "paused":
                break
    return view


def _summary(job: Job, view: dict[str, Any], adapter: Path | None) -> None:
    out = console()
    out.print(job_table([view]))
    for row in job.evaluations():
        out.print(f"version {row.version}: {row.mean:.3f} ± {row.stderr:.3f} on {row.prompts} held-out prompts")
    if view["state"] == "completed" and adapter is not None:
        out.print(f"adapter: {adapter}", markup=False)
    elif view["state"] == "completed":
        out.print(f"talk with it: rookery chat {job.id}", markup=False)
    elif view["state"] == "paused":
        out.print(f"paused: {view['reason']}; when that is mended: rookery jobs resume {job.id}", markup=False)


def _show_plan(client: Client, raw: dict[str, Any], folder: Path, json: bool) -> int:
    plan = client.dry_run(raw, folder=folder)
    if json:
        print_json(plan)
        return COMPLETED
    import yaml

    out = console()
    out.print(yaml.safe_dump(jsons.loads(jsons.dumps(plan["spec"])), sort_keys=False, allow_unicode=True), markup=False)
    for number, prompt in enumerate(plan["prompts"], 1):
        out.print(f"--- prompt {number}, {prompt['tokens']} tokens\n{prompt['text']}", markup=False)
    return COMPLETED


def _say(json: bool, text: str, job: Job) -> None:
    if json:
        print_json({"job": dict(job.show()), "note": text})
    else:
        console().print(text, markup=False)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Whoever ends this command with SIGTERM gets the same orderly end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
