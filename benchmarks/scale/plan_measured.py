"""Predicted seconds of plans against measured ones: real workers of one and two threads, and a throttled one.

``python -m benchmarks.scale.plan_measured``. ``rookery profile`` measures the machine with one thread and with two. The
third kind is a worker of one thread that is stopped for half of each tenth of a second: its entry has twice the seconds
of one thread's. Each plan runs the same job; the time between its steps is compared with the prediction.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

from benchmarks.lib.harness import MODEL, Result, command
from benchmarks.lib.service import Bench, Liked, completed, job, service, until_served
from benchmarks.lib.workload import REPLY_TOKENS, stories
from benchmarks.scale.planning import RANK_CORRELATION, ranks

from rookery.cli.plan import MEASURED_SLOWER
from rookery.scheduling.plan.predict import PLAYS, Role, devices_of, predict
from rookery.settings import TOKEN_VARIABLE
from rookery.spec.fleet import FleetSpec, JobDemand

THREADS = {"one": 1, "two": 2, "half": 1}
"""By machine, the last of which is throttled."""
DUTY, CYCLE = 0.5, 0.1
"""Share of each cycle, in seconds, in which a throttled worker runs."""
PROMPTS, COMPLETIONS, PROMPT_TOKENS = 4, 4, 45
STEPS = 4
"""Of each plan's job; the first two are not counted."""
PLANS: list[dict[str, Role]] = [
    {"one-0": "both"},
    {"two-0": "both"},
    {"half-0": "both"},
    {"one-0": "rollout", "one-1": "train"},
    {"one-0": "both", "one-1": "rollout"},
    {"one-0": "both", "one-1": "both"},
    {"half-0": "rollout", "one-0": "train"},
    {"half-0": "train", "one-0": "rollout"},
    {"half-0": "rollout", "one-0": "both"},
]


def profiled(threads: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "rookery.worker.profile", "--model", MODEL, "--name", f"threads-{threads}"]
    run = subprocess.run(words, env={**os.environ, "ROOKERY_THREADS": str(threads)}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return found | {"download": 1e9, "upload": 1e9, "latency": 0.01}


def throttled(entry: dict[str, Any]) -> dict[str, Any]:
    """The machine at :data:`DUTY` of its speed."""
    slower = {name: entry[name] / DUTY for name in ("prefill_token", "train_token", "optimizer")}
    return entry | slower | {"decode": [[rows, seconds / DUTY] for rows, seconds in entry["decode"]]}


@contextmanager
def stopped_and_continued(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within, the process runs for :data:`DUTY` of the time."""
    over = threading.Event()

    def cycle() -> None:
        while not over.wait(CYCLE * DUTY):
            process.send_signal(signal.SIGSTOP)
            over.wait(CYCLE * (1 - DUTY))
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measured(bench: Bench, number: int, plan: dict[str, Role]) -> list[float]:
    """Seconds between the steps of a job on the plan's workers."""
    token = (bench.data / "worker.token").read_text().strip()
    with ExitStack() as stack:
        for name, role in plan.items():
            threads = THREADS[name.partition("-")[0]]
            words = ["--connect", bench.url, "--model", MODEL, "--name", name, "--roles", ",".join(PLAYS[role])]
            worker = subprocess.Popen(
                [sys.executable, "-m", "rookery.cli", "worker", *words], stderr=subprocess.DEVNULL,
                env={**os.environ, TOKEN_VARIABLE: token, "ROOKERY_THREADS": str(threads)},
            )  # fmt: skip
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
            if name.startswith("half"):
                stack.enter_context(stopped_and_continued(worker))
        until_served(bench.client, len(plan))
        given = job(f"plan-{number}", STEPS, seed=number, group_size=COMPLETIONS, groups_per_step=PROMPTS)
        submitted = bench.client.train(environment=Liked(stories(PROMPTS * STEPS)), **given)
        completed(submitted)
        times = [row.time for row in submitted.metrics(follow=False)]
    return [after - before for before, after in pairwise(times[1:])]


def main() -> None:
    result = Result("plan_measured", "Predicted seconds of plans against measured ones", command())
    entries = {"one": profiled(1), "two": profiled(2)}
    entries["half"] = throttled(entries["one"])
    counts = {"one": 2, "two": 1, "half": 1}
    fleet = FleetSpec.model_validate(
        {"machines": [entry | {"name": name, "count": counts[name]} for name, entry in entries.items()]}
    )
    devices = devices_of(fleet)
    demand = JobDemand(
        name="job", group_size=COMPLETIONS, groups_per_step=PROMPTS, prompt_tokens=PROMPT_TOKENS,
        median_tokens=REPLY_TOKENS, sigma=0.0, max_tokens=REPLY_TOKENS, environment=0.0,
    )  # fmt: skip
    predicted, found = list[float](), list[float]()
    with service(workers=0, rejoin_seconds=1.0) as bench:
        for number, plan in enumerate(PLANS):
            roles: list[Role] = [plan.get(device.name, "off") for device in devices]
            expected = predict(fleet, devices, [demand], roles)
            assert not expected.problem, expected.problem
            seconds = measured(bench, number, plan)
            predicted.append(expected.seconds)
            found.append(statistics.median(seconds))
            what = ", ".join(f"{name} {role}" for name, role in plan.items())
            result.add(f"{what}: a step", seconds, "s", f"{expected.seconds:.2f} s predicted")
    errors = [abs(p / m - 1) for p, m in zip(predicted, found, strict=True)]
    rho = statistics.correlation(ranks(predicted), ranks(found))
    result.add("error of the predicted seconds against the measured ones", errors, "of 1")
    result.judge(
        "predicted and measured seconds: rank correlation (Spearman) >= 0.8", f"{rho:.2f}", rho >= RANK_CORRELATION,
        f"{len(PLANS)} measured plans, median absolute error {statistics.median(errors):.0%}",
    )  # fmt: skip
    slower = [m / p for p, m in zip(predicted, found, strict=True)]
    least, most = MEASURED_SLOWER
    result.judge(
        "measured seconds within the interval that rookery plan prints",
        f"{min(slower):.2f} to {max(slower):.2f} times the predicted", least <= min(slower) and max(slower) <= most,
        f"it prints {least} to {most} times",
    )  # fmt: skip
    result.save()


if __name__ == "__main__":
    main()
