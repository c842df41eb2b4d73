"""``rookery plan``: roles for described machines; ``rookery profile``: the description of this machine."""

from __future__ import annotations

import json as jsons
import re
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rookery.bounds import FORMS, GIVEN_NAME
from rookery.children import child_variables, interpreter
from rookery.cli.options import JsonOption, check_child, last_line, number_option, path_option
from rookery.cli.output import print_json, show
from rookery.errors import UserError, count_of, short
from rookery.folders import replaced
from rookery.scheduling.plan.predict import Device, devices_of, plan_of
from rookery.scheduling.plan.search import BUDGET, Found, gains, search
from rookery.settings import TrainingSettings
from rookery.spec.files import read_job
from rookery.spec.fleet import MAX_JOBS, FleetMachine, FleetSpec, JobDemand, Plan, PlannedWorker, parsed, read_fleet
from rookery.spec.job import JobSpec
from rookery.spec.machine import MOST
from rookery.spec.parsing import SpecError, parse_job
from rookery.telemetry.rows import Rows, columns
from rookery.tokenization.registry import canonical

UNMEASURED = {
    "rows": 1, "context": 2, "decode": [[1, 1.0]], "prefill_token": 0, "prefill_slice": 1, "train_token": 0,
    "train_slice": 1, "optimizer": 0, "adapter_bytes": 0, "state_bytes": 0, "load": 0,
}  # fmt: skip
"""The fields of an entry that a measurement gives, with values for a check of the others."""

BY_DEFAULT = {"download": 125e6, "upload": 125e6, "latency": 0.001}
"""The fields of a new entry that are neither measured nor given."""

MEASURED_SLOWER = (1.05, 1.5)
"""Seconds of a step over the predicted ones, at least and at most, of the plans that were measured with real workers
(``benchmarks/scale/plan_measured.py``), rounded outwards."""


def plan(
    workers: Annotated[Path, path_option(help="The fleet file: machines, their speeds, links.")],
    jobs: Annotated[list[Path], path_option(help="A job file; give the option once for each job.")],
    reply_tokens: Annotated[
        float | None,
        number_option(min=1, max=131072, help="Median tokens of a reply; by default half of max_tokens."),
    ] = None,
    sigma: Annotated[
        float, number_option(min=0, max=3, help="Spread of reply lengths: the deviation of their logarithm.")
    ] = 0.6,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 40, help="Tokens of a prompt.")] = 64,
    environment: Annotated[
        float, number_option(min=0, max=1e6, help="Seconds of the environment for an episode.")
    ] = 0.0,
    budget: Annotated[int, typer.Option(min=1, max=100_000, help="Plans that are predicted.")] = BUDGET,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same plan.")] = 0,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also simulate the plan with the real controller.")] = (
        False
    ),
    out: Annotated[Path | None, path_option(help="Write the plan to this file, for rookery serve --plan.")] = None,
    json: JsonOption = False,
) -> None:
    """Choose roles for unlike machines: which generate, which train, and which are not needed."""
    if out is not None and out.resolve() in [path.resolve() for path in (workers, *jobs)]:
        raise UserError(f"--out: {out} is what the plan is made from; give another file")
    check_folder(out)
    fleet = read_fleet(workers)
    devices = devices_of(fleet)
    texts = (reply_tokens, sigma, prompt_tokens, environment)
    specs = [job_of(path).with_models(canonical) for path in jobs]
    demands = [demand for spec in specs for demand in demands_of(spec, *texts)]
    if len(demands) > MAX_JOBS:
        raise UserError(f"--jobs: they train {count_of(len(demands), 'policy')}, at most {MAX_JOBS}; plan some of them")
    model, *others = dict.fromkeys(name for spec in specs for name in spec.base_models)
    if others:
        raise UserError(
            f"--jobs: the jobs have the base models {' and '.join(sorted([model, *others]))}; plan for each by itself"
        )
    if unlike := [machine for machine in fleet.machines if canonical(machine.model) not in ("", model)]:
        raise UserError(
            f"{workers}: {unlike[0].name} was measured with {unlike[0].model}, the jobs have the base model {model};"
            f" measure it with rookery profile --model {shlex.quote(model)}"
        )
    found = search(fleet, devices, demands, budget=budget, seed=seed)
    if (seconds := found.prediction.seconds) > MOST:
        reason = found.prediction.problem or f"a step would take {seconds:.3g} s"
        raise UserError(f"{workers}: no plan can run these jobs: {reason}")
    more = {name: max(0.0, gain) for name, gain in gains(fleet, demands, found, budget=budget, seed=seed).items()}
    planned = plan_of(fleet, devices, demands, found.prediction).model_copy(update={"model": model})
    report = as_json(devices, found, more)
    report["commands"] = [command(worker, planned, followed=out is not None) for worker in planned.workers]
    if simulate:
        from rookery.simulation.planned import simulate_plan

        report["simulated_seconds"] = simulate_plan(planned)
    if out is not None:
        with replaced(out) as file:
            file.write(yaml.safe_dump(planned.model_dump(mode="json", exclude_none=True), sort_keys=False).encode())
    if json:
        print_json(report)
        return
    show(_table(devices, found))
    show(
        f"One optimizer step of every job: {found.prediction.seconds:.1f} s ({count_of(found.evaluations, 'plan')}"
        " predicted)"
    )
    low, high = report["measured_seconds"]
    least, most = MEASURED_SLOWER
    show(
        f"Expect {low:.1f} to {high:.1f} s: steps of real workers took {least} to {most} times as long as predicted,"
        " in benchmarks/scale/plan_measured.py"
    )
    if simulate:
        show(f"Simulated with the real controller: {report['simulated_seconds']:.1f} s")
    for name, gain in more.items():
        show(f"One more {name}: {gain:.0%} less time" if gain >= 0.005 else f"One more {name}: no gain")
    service = f", for rookery serve --plan {out}" if out is not None else ""
    show(f"\nCommands, each on its machine{service}:")
    for line in report["commands"]:
        show(f"  {line}")


def check_folder(out: Path | None) -> None:
    """Raises :class:`UserError` where no file can be written, before minutes of work are lost."""
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out: {out.parent} is not a folder")


def job_of(path: Path) -> JobSpec:
    """The job in one of several files. Raises :class:`UserError`, whose lines begin with the file's path."""
    try:
        return parse_job(read_job(path))
    except SpecError as error:
        raise SpecError([f"{path}: {problem}" for problem in error.problems]) from None


def profile(
    name: Annotated[str | None, typer.Option(help="The machine's name; by default its host name.")] = None,
    model: Annotated[str, typer.Option(help="The base model.")] = "smollm2-135m-instruct",
    price: Annotated[
        float | None, number_option(min=0.001, help="Price of an hour, in any unit; by default 1.")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Where the machine is.")] = None,
    bandwidth: Annotated[
        float | None,
        number_option(min=1, help="Bytes per second between this machine and the service; by default 125,000,000."),
    ] = None,
    latency: Annotated[
        float | None, number_option(min=0, help="Seconds of a transfer before its first byte; by default 0.001.")
    ] = None,
    out: Annotated[
        Path | None,
        path_option(
            help="A fleet file: the entry is added, or measured again; fields of it that this command does not give"
            " stay."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure this machine in under two minutes: its entry of a fleet file."""
    named = name or socket.gethostname().split(".")[0]
    if re.fullmatch(GIVEN_NAME, named) is None:
        raise UserError(f"--name: given {short(repr(named))}, allowed: {FORMS[GIVEN_NAME]}")
    model = canonical(model)
    options = {"price": price, "site": site, "download": bandwidth, "upload": bandwidth, "latency": latency}
    given = {"name": named, "model": model} | {field: value for field, value in options.items() if value is not None}
    # What cannot be used is refused before the measurement.
    parsed(FleetMachine, Path(named), UNMEASURED | BY_DEFAULT | given)
    check_folder(out)
    if out is not None:
        merged(out, UNMEASURED | given)
    run = subprocess.run(
        interpreter("rookery.start", "rookery.worker.profile", "--model", model, "--name", named),
        stdout=subprocess.PIPE, check=False, env=child_variables(),
    )  # fmt: skip
    if run.returncode > 0:  # it has written the reason
        raise typer.Exit(run.returncode)
    check_child(run, "the measurement")
    measured = jsons.loads(last_line(run.stdout.decode())) | given
    try:
        if out is not None:
            found = add_entry(out, measured)
        else:
            found = parsed(FleetMachine, Path(named), BY_DEFAULT | measured)
    except (UserError, OSError):  # the file has changed: two minutes of measurement are not lost
        show(yaml.safe_dump({"machines": [measured]}, sort_keys=False, default_flow_style=None))
        raise
    entry = found.model_dump(mode="json", exclude_none=True)
    if json:
        print_json(entry)
    else:
        show(yaml.safe_dump({"machines": [entry]}, sort_keys=False, default_flow_style=None))


def add_entry(path: Path, entry: dict[str, Any]) -> FleetMachine:
    """Write the entry into a fleet file, over the fields of one with its name; the result. Raises
    :class:`UserError`."""
    fleet = merged(path, entry)
    written = yaml.safe_dump(fleet.model_dump(mode="json", exclude_none=True), sort_keys=False)
    with replaced(path) as file:
        file.write(written.encode())
    return next(machine for machine in fleet.machines if machine.name == entry["name"])


def merged(path: Path, entry: dict[str, Any]) -> FleetSpec:
    """The fleet file, which may not exist, with the entry over the fields of one with its name, and over
    :data:`BY_DEFAULT` where there is none. Raises :class:`UserError`."""
    before: dict[str, Any] = {"machines": []}
    if path.exists():
        before = read_fleet(path).model_dump(mode="json", exclude_none=True)
    for machine in before["machines"]:
        if machine["model"] and canonical(entry.get("model", machine["model"])) != canonical(machine["model"]):
            raise UserError(
                f"{path}: {machine['name']} was measured with {machine['model']}; give another file for"
                f" {entry['model']}: a fleet file is for one base model"
            )
    machines = {machine["name"]: machine for machine in before["machines"]}
    machines[entry["name"]] = machines.pop(entry["name"], BY_DEFAULT) | entry
    return parsed(FleetSpec, path, before | {"machines": list(machines.values())})


def demands_of(
    spec: JobSpec, reply_tokens: float | None, sigma: float, prompt_tokens: int, environment: float
) -> list[JobDemand]:
    """The work of a step of each policy that the job trains; its file does not say how long replies are, and a policy
    counts as one that replies once in an episode. Raises :class:`UserError` for an
    algorithm on rows, for policies of several base models, and for one that trains all parameters."""
    if spec.algorithm.on_rows:
        raise UserError(
            f"{spec.name}: {spec.algorithm.name} samples nothing, and a plan divides sampling and training; leave the"
            " job out: any worker with the role train runs it"
        )
    models = {spec.base_model_of(name) for name in spec.policies}
    if len(models) > 1:
        names = " and ".join(sorted(models))
        raise UserError(f"{spec.name}: its policies have the base models {names}; a plan is for one base model")
    found = []
    for name in spec.trained:
        one = spec.of_policy(name)
        algorithm, (_, policy) = one.algorithm, one.policy
        if policy.full:
            raise UserError(f"{spec.name}: the policy {name} trains all parameters, and a plan is for adapters")
        found.append(
            JobDemand(
                name=f"{spec.name}/{name}" if spec.several_trained else spec.name,
                turns=len(spec.policies),
                policies=len(spec.trained),
                group_size=algorithm.group_size,
                groups_per_step=algorithm.groups_per_step,
                prompt_tokens=prompt_tokens,
                median_tokens=min(reply_tokens or max(1.0, one.sampling.max_tokens / 2), one.sampling.max_tokens),
                sigma=sigma,
                max_tokens=one.sampling.max_tokens,
                environment=environment / len(spec.policies),  # of each reply
                staleness=algorithm.max_staleness,
                micro_batch=algorithm.micro_batch,
                trainers=policy.trainers,
                rank=policy.rank,
            )
        )
    return found


def command(worker: PlannedWorker, plan: Plan, *, followed: bool) -> str:
    """The command that starts a worker of the plan. Where a service has the plan (``followed``), it gives the worker
    its roles, and others when machines leave: the worker is started with both. The machine's speeds hold for the
    slices of its measurement."""
    machine = next(machine for machine in plan.fleet.machines if machine.name == worker.machine)
    words = ["rookery worker --connect URL", f"--name {worker.name}", f"--model {shlex.quote(plan.model)}"]
    words += [] if followed else [f"--roles {','.join(worker.roles)}"]
    words.append(f"--max-rows {worker.max_rows}")
    words += ["--preemptible"] * machine.preemptible + [f"--price {machine.price:g}"]
    words += [f"--site {shlex.quote(machine.site)}"] if machine.site else []
    if worker.slice_tokens != TrainingSettings().slice_tokens:
        words.insert(0, f"ROOKERY_SLICE_TOKENS={worker.slice_tokens}")
    return " ".join(words)


def as_json(devices: list[Device], found: Found, more: dict[str, float]) -> dict[str, Any]:
    uses = zip(devices, found.prediction.uses, strict=True)
    return {
        "step_seconds": found.prediction.seconds,
        "measured_seconds": [found.prediction.seconds * times for times in MEASURED_SLOWER],
        "measured_times": list(MEASURED_SLOWER),
        "evaluations": found.evaluations,
        "workers": [
            {"name": device.name, "machine": device.machine.name, "role": use.role, "rows": use.rows,
             "episodes": use.episodes, "policies": list(use.policies), "busy": found.prediction.busy(i)}
            for i, (device, use) in enumerate(uses)
        ],
        "one_more": more,
    }  # fmt: skip


def _table(devices: list[Device], found: Found) -> Rows:
    rows = Rows(columns(("machine", "role"), ("rows", "episodes a step", "busy"), ("trains",)))
    for i, (device, use) in enumerate(zip(devices, found.prediction.uses, strict=True)):
        rows.add(
            device.name, {"off": "not needed", "both": "rollout, train"}.get(use.role, use.role),
            str(use.rows or ""), f"{use.episodes:.0f}" if use.episodes else "", f"{found.prediction.busy(i):.0%}",
            ", ".join(use.policies),
        )  # fmt: skip
    return rows
