"""``rookery run job.yaml``: runs one job from its file to its end.

With a service (a configured one, or one that answers at the default address) the job is submitted there and followed;
Ctrl-C only stops following, and a job that its owner pauses is waited for. Without one, a service is started for this
run alone. Its data folder is named after the job's content, so the same file again resumes the unfinished job there.
"""

from __future__ import annotations

import hashlib
import json as jsons
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rookery.cli.follow import Follower, pause_line
from rookery.cli.options import COMPLETED, ENDINGS, INTERRUPTED, Cli, path_argument, path_option, with_options
from rookery.cli.output import print_json, show
from rookery.client import Client, Job, Record
from rookery.client.job import ENDED
from rookery.errors import Conflict, Unavailable, UserError, count_of, to_stderr
from rookery.folders import temporary_folder
from rookery.settings import Settings
from rookery.spec.files import read_job
from rookery.spec.job import JobSpec
from rookery.spec.parsing import parse_job
from rookery.spec.prime import read_prime
from rookery.storage.data_dir import ADMIN_KEY_FILE, DATABASE_FILE
from rookery.telemetry.numbers import evaluation_text
from rookery.telemetry.table import job_line

RUNS = Path("runs")
"""The folder of runs without a service, in the working directory."""


@with_options
def run(
    cli: Cli,
    job_file: Annotated[
        Path, path_argument(metavar="FILE", help="The job: YAML or JSON, or TOML of Prime's hosted training.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, show the whole job and three prompts.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit to the running service and exit.")] = False,
    adapter: Annotated[Path | None, path_option(help="Write the final PEFT adapter into this folder.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Without a service: cancel an interrupted run.")] = False,
) -> None:
    """Run one job to its end, on a running service if there is one, else on a service for this run alone."""
    ends = "the run is not followed to its end" if detach else "nothing runs" if dry_run else ""
    if adapter is not None and ends:
        raise UserError(f"--adapter: {ends}, so no adapter is written; leave it out")
    if adapter is not None:
        _check_writable(adapter)
    raw, notes = read_prime(job_file) if job_file.suffix.lower() == ".toml" else (read_job(job_file), [])
    to_stderr(*notes)
    spec = parse_job(raw)
    folder = job_file.parent
    client = _running_service(cli.settings)
    if client is not None:
        if new:
            raise UserError("--new is for a run without a service; here, rookery jobs cancel JOB ends the other one")
        with client:
            code = _plan(cli, client, raw, folder) if dry_run else _submit(cli, client, raw, folder, detach, adapter)
    elif detach:
        address = cli.settings.base_url
        raise Unavailable(f"--detach needs a service, and none answers at {address}: rookery serve")
    elif dry_run:
        with temporary_folder() as data, _embedded(Path(data), "") as own:
            code = _plan(cli, own, raw, folder)
    else:
        code = _run_alone(cli, raw, spec, folder, adapter, new)
    raise typer.Exit(code)


def _check_writable(adapter: Path) -> None:
    """Raises :class:`UserError` where no file can be written into the folder, before the run instead of after it."""
    try:
        adapter.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=adapter):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--adapter: {adapter} cannot be written ({reason}); give another folder") from None


def _submit(cli: Cli, client: Client, raw: dict[str, Any], folder: Path, detach: bool, adapter: Path | None) -> int:
    job = client.submit(raw, folder=folder)
    follow = f"follow it with: rookery jobs logs -f {job.id}"
    if detach:
        _note(cli, f"{job.name} is submitted; {follow}", job)
        return COMPLETED
    return _follow(cli, job, adapter, f"{job.name} continues; {follow}; end it with: rookery jobs cancel {job.id}")


def _run_alone(cli: Cli, raw: dict[str, Any], spec: JobSpec, folder: Path, adapter: Path | None, new: bool) -> int:
    data = cli.settings.data if cli.data is not None else _run_folder(raw, spec)
    _check_alone(data)
    if not cli.json:
        show(f"no service is running: starting one for this job; its data: {data}")
    with _embedded(data, spec.base_model) as client:
        earlier = _unfinished(client, spec)
        if earlier is not None and new:
            earlier.cancel()
        if earlier is None or new:
            job = client.submit(raw, folder=folder)
        else:
            job = _resumed(cli, client, earlier, raw, folder)
        target = adapter if adapter is not None else data / "adapter"
        continues = (
            "the same command continues it; or: rookery serve --data"
            f" {data}, then: rookery jobs resume {job.id} --data {data}"
        )
        code = _follow(cli, job, target, "stopped; the same command resumes from the last step", continues)
    if code == COMPLETED and not cli.json:
        steps = f"rookery serve --data {data}, then: rookery chat {job.id} --data {data}"
        show(f"chat with it: {steps}")
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
def _embedded(folder: Path, models: str) -> Iterator[Client]:
    """A client of a service in this process, on a free port; on exit everything that it started is stopped."""
    from rookery.server.launcher import EmbeddedService

    settings = Settings.alone(data=folder.absolute(), port=0, models=models)
    with EmbeddedService(settings) as service, Client(service.url, service.key, settings=settings) as client:
        yield client


def _check_alone(data: Path) -> None:
    """Raises :class:`UserError` where the folder is that of a service whose database is elsewhere."""
    if (data / ADMIN_KEY_FILE).exists() and not (data / DATABASE_FILE).exists():
        raise UserError(
            f"the data folder {data} belongs to a service whose database is elsewhere (ROOKERY_DATABASE): start that"
            " service with rookery serve, or give another folder with --data"
        )


def _run_folder(raw: dict[str, Any], spec: JobSpec) -> Path:
    """Named after the job's content, so that two different jobs never share a folder."""
    content = jsons.dumps(raw, sort_keys=True, default=str).encode()
    return RUNS / f"{spec.name}-{hashlib.sha256(content).hexdigest()[:8]}"


def _unfinished(client: Client, spec: JobSpec) -> Job | None:
    """The job of an interrupted run of a job of the same name."""
    for view in client.views():
        if view.name == spec.name and view.state not in ENDED:
            return client.job(view.id)
    return None


def _resumed(cli: Cli, client: Client, job: Job, raw: dict[str, Any], folder: Path) -> Job:
    """The job of an interrupted run, which continues. Raises :class:`Conflict` where it differs from the file's job."""
    if differing := client.differences(job.id, raw, folder=folder):
        raise Conflict(
            f"job {job.name} ({job.id}) of this data folder has not ended and differs from the file in"
            f" {', '.join(differing)}; --new ends it and starts the file's job, or give that one another name"
        )
    view = job.show()
    if not cli.json:
        show(f"continues job {job.name} ({job.id}) at step {view.step}")
    if view.state == "paused":
        job.resume()
    return job


def _follow(cli: Cli, job: Job, adapter: Path | None, interrupted: str, continues: str = "") -> int:
    """Shows the job until it ends, or pauses for a fault of its own; returns the exit code."""
    try:
        view = Follower(cli, job, ends_paused=True, continues=continues).follow()
    except KeyboardInterrupt:
        _note(cli, interrupted, job)
        return INTERRUPTED
    if adapter is not None and view.state == "completed":
        job.adapter().download(adapter)
    else:
        adapter = None
    evaluations = job.evaluations()
    if cli.json:
        print_json({"job": view, "evaluations": evaluations, "adapter": None if adapter is None else str(adapter)})
    else:
        _summary(job, view, evaluations, adapter, continues)
    return ENDINGS[view.state]


def _summary(job: Job, view: Record, evaluations: list[Record], adapter: Path | None, continues: str) -> None:
    show(job_line(view))
    several = len(view.spec.policies) > 1
    for row in evaluations:
        line = f"{row.policy + ' ' if several else ''}version {row.version}: {evaluation_text(row)}"
        show(line + (f"; the best constant reply earns {row.constant['reward']:.3f}" if row.constant else ""))
    if adapter is not None:
        show(f"adapter: {adapter}")
    elif view.state == "completed":
        show(f"chat with it: rookery chat {job.id}")
    elif view.state == "paused":
        show(pause_line(job, view, continues))


def _plan(cli: Cli, client: Client, raw: dict[str, Any], folder: Path) -> int:
    """Shows the whole job and three prompts; nothing is created."""
    plan = client.dry_run(raw, folder=folder)
    if cli.json:
        print_json(plan)
        return COMPLETED
    show(yaml.safe_dump(jsons.loads(jsons.dumps(plan["spec"])), sort_keys=False, allow_unicode=True).rstrip())
    for line in plan["warnings"]:
        show(f"warning: {line}")
    for number, prompt in enumerate(plan["prompts"], 1):
        show(f"--- prompt {number}, {count_of(prompt['tokens'], 'token')}\n{prompt['text']}")
    where = "held-out" if plan["spec"]["evaluation"]["prompts"] else "training"
    for policy, constant in plan["constants"].items():
        whose = f" of {policy}" if len(plan["spec"]["policies"]) > 1 else ""
        reply = jsons.dumps(constant["reply"], ensure_ascii=False)
        show(
            f"best constant reply{whose}: {reply} earns {constant['reward']:.3f} on"
            f" {count_of(constant['prompts'], f'{where} prompt')}"
        )
    return COMPLETED


def _note(cli: Cli, text: str, job: Job) -> None:
    cli.show({"job": dict(job.show()), "note": text} if cli.json else None, text)
