"""``rookery simulate``: replays an availability trace against the real controller with simulated machines."""

from __future__ import annotations

import json as jsons
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.options import JsonOption, number_option, path_option
from rookery.cli.output import print_json, show
from rookery.folders import replaced


def simulate(
    trace: Annotated[str, typer.Option(help="calm, bursty, diurnal, or a CSV file (time,instances).")] = "calm",
    profile: Annotated[str, typer.Option(help="How fast machines are: a packaged profile or a JSON file.")] = (
        "two-core-cpu-135m"
    ),
    modes: Annotated[str, typer.Option(help="all, or a comma-separated list of them.")] = "all",
    hours: Annotated[float, number_option(min=0.01, max=1000, help="Virtual hours of the trace.")] = 0.5,
    faster: Annotated[float, number_option(min=0.001, help="Replay the trace this many times faster.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Concurrent jobs, each of a different tenant.")] = 1,
    policies: Annotated[
        int, typer.Option(min=1, max=8, help="Policies of each job, which reply in turn and are trained.")
    ] = 1,
    groups: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Groups per step, instead of the profile's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="End each policy after this many steps.")] = None,
    staleness: Annotated[int, typer.Option(min=0, max=64, help="The jobs' max_staleness; 0 is on-policy.")] = 0,
    micro_batch: Annotated[
        int | None,
        typer.Option(min=0, help="Episodes with which training begins; by default a quarter of a step's."),
    ] = None,
    reserved: Annotated[int, typer.Option(min=1, max=1000, help="Reserved machines.")] = 1,
    discount: Annotated[
        float, number_option(min=0, max=1, help="Discount on the price of preemptible machines.")
    ] = 0.7,
    notice: Annotated[
        float, number_option(min=0, help="Seconds between the preemption notice and the end; 0: no notice.")
    ] = 0.0,
    flush: Annotated[
        float | None, number_option(min=0.001, help="The service's flush_seconds; larger ones simulate faster.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same run, event by event.")] = 0,
    out: Annotated[Path | None, path_option(help="A folder for results.json.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare ways of using reserved and preemptible machines, in virtual time. No model is run."""
    from rookery.simulation.profiles import load_profile
    from rookery.simulation.replay import Scenario, parse_modes, replay
    from rookery.simulation.report import as_json, digest, tables
    from rookery.simulation.traces import HOUR, load_trace

    machines, wanted = load_profile(profile), parse_modes(modes)
    load = machines.workload
    if groups is not None:
        load = load.model_copy(update={"groups_per_step": groups})
        machines = machines.model_copy(update={"workload": load})
    scenario = Scenario(
        profile=machines,
        trace=load_trace(trace).faster(faster).cut(hours * HOUR),
        seed=seed,
        jobs=jobs,
        policies=policies,
        steps=steps,
        max_staleness=staleness,
        micro_batch=load.episodes // 4 if micro_batch is None else micro_batch,
        reserved=reserved,
        discount=discount,
        notice=notice,
        flush=Scenario.flush if flush is None else flush,
    )
    outcomes = []
    for mode in wanted:
        typer.echo(f"simulating {mode.name}: {mode.about}", err=True)
        with _quiet():
            outcomes.append(replay(scenario, mode))
    found = as_json(outcomes)
    if json:
        print_json(found)
    else:
        show(tables(outcomes))
        show(f"event log {digest(outcomes)}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with replaced(out / "results.json") as file:
            file.write((jsons.dumps(found, indent=1) + "\n").encode())
        typer.echo(f"written: {out / 'results.json'}", err=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, no warnings are logged: lost workers are part of the simulation."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
