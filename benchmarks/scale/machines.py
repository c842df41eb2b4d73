"""More machines: jobs on 1, 2 and 4 workers of equal speed, a worker's start by Ray and by hand, and a training step on
two processes and on one.

    python -m benchmarks.scale.machines [--only PART ...]       (the part ``ray`` in an environment with rookery[ray])

All parts use the real model. The part ``workers`` gives each worker a share of a core with the kernel's CPU quota, so
that more workers are more compute on the same two cores; it runs as root with cgroup v1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import MODEL, Result, command, options, ratio, versions
from benchmarks.lib.model import ours
from benchmarks.lib.service import Liked, completed, job, service, until_served
from benchmarks.lib.workload import stories
from tests.chaos.driver import wait_until

from rookery.settings import TOKEN_VARIABLE

SEQUENCES, LENGTH = 4, 96
CGROUPS = Path("/sys/fs/cgroup/cpu")
WORKERS, JOBS, STEPS, GROUPS = (1, 2, 4), 4, 3, 2
QUOTA = 0.4
"""Cores for each worker: four leave 0.4 of two cores to the service."""


@contextmanager
def cpu_quotas(count: int) -> Iterator[list[Path]]:
    """Control groups whose processes together get ``QUOTA`` cores each. Raises ``OSError``."""
    folders = [CGROUPS / f"rookery-bench-{at}" for at in range(count)]
    with ExitStack() as stack:
        for folder in folders:
            folder.mkdir(exist_ok=True)  # of a run that was killed
            stack.callback(folder.rmdir)
            period = int((folder / "cpu.cfs_period_us").read_text())
            (folder / "cpu.cfs_quota_us").write_text(str(round(period * QUOTA)))
        yield folders


def workers(result: Result, times: int) -> None:
    """``JOBS`` jobs at once, on new workers each time. Time counts from the submission to the last job's end."""
    rates: dict[int, list[float]] = {count: [] for count in WORKERS}
    costs: dict[int, list[float]] = {count: [] for count in WORKERS}
    for _ in range(times):
        for count in WORKERS:
            tokens, seconds, used = jobs_on_workers(count)
            rates[count].append(tokens / seconds)
            costs[count].append(1e6 * used / tokens)
    rows = {
        count: result.add(f"{count} workers: {JOBS} jobs", rates[count], "tokens/s", f"{QUOTA} cores each")
        for count in WORKERS
    }
    for count in WORKERS:
        what = f"{count} workers: the service's CPU time per token"
        result.add(what, costs[count], "µs", "environments and client included")
    for count in WORKERS[1:]:
        share = ratio(rows[count], rows[1]) / count
        result.notes.append(f"{count} workers: {share:.0%} of {count} times the tokens per second of one.")


def jobs_on_workers(count: int) -> tuple[float, float, float]:
    """Tokens sampled and trained on, wall seconds, and the service's CPU seconds."""
    with ExitStack() as stack:
        bench = stack.enter_context(service(workers=0))
        token = {TOKEN_VARIABLE: (bench.data / "worker.token").read_text().strip(), "ROOKERY_THREADS": "1"}
        for folder in stack.enter_context(cpu_quotas(count)):
            worker = worker_by_hand(bench.url, token, folder)
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
        until_served(bench.client, count)
        client = bench.client
        completed(client.train(environment=Liked(stories(GROUPS)), **job("warm", 1, groups_per_step=GROUPS)))
        used, began = time.process_time(), time.monotonic()
        jobs = [
            client.train(
                environment=Liked(stories(GROUPS * STEPS)),
                **job(f"job-{at}", STEPS, groups_per_step=GROUPS, staleness=1, seed=at),
            )
            for at in range(JOBS)
        ]  # fmt: skip
        rows = [row for each in jobs for row in completed_metrics(each)]
        seconds, used = time.monotonic() - began, time.process_time() - used
    return sum(row.length_mean * row.episodes for row in rows), seconds, used


def completed_metrics(submitted: Any) -> list[Any]:
    completed(submitted)
    return list(submitted.metrics(follow=False))


def ray_start(result: Result, times: int) -> None:
    """Both kinds of workers have one thread and join the same service; they take turns."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_AUTH_MODE": "disabled", "ROOKERY_THREADS": "1"}
    result.versions.update(versions("ray"))
    began = time.perf_counter()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    result.add("a head starts", [time.perf_counter() - began], "s")
    spent: dict[str, list[float]] = {"node": [], "ray": [], "hand": []}
    settings = {"cluster": "ray", "ray_address": cluster.address, "workers": 0, "ray_spot_workers": 1}
    try:
        with service(**settings) as bench:

            def serving() -> float:
                """Seconds until a worker serves."""
                began = time.perf_counter()
                until_served(bench.client)
                return time.perf_counter() - began

            def left() -> None:
                wait_until(
                    lambda: not any(worker.state == "serving" for worker in bench.client.workers()), "the worker left"
                )

            token = {TOKEN_VARIABLE: (bench.data / "worker.token").read_text().strip()}
            for _ in range(times + 1):  # the first warms up
                began = time.perf_counter()
                node = cluster.add_node(labels={"pool": "spot"}, num_cpus=1)
                spent["node"].append(time.perf_counter() - began)
                spent["ray"].append(serving())
                cluster.remove_node(node)
                left()
                worker = worker_by_hand(bench.url, token)
                spent["hand"].append(serving())
                worker.terminate()
                worker.wait()
                left()
    finally:
        cluster.shutdown()
    result.add("a node joins the cluster", spent["node"][1:], "s")
    placed = result.add("its worker serves after", spent["ray"][1:], "s", "actor placed, Python, torch, model")
    hand = result.add("rookery worker, started by hand, serves after", spent["hand"][1:], "s")
    result.notes.append(f"A start by Ray takes {ratio(placed, hand):.2f} of the time of one by hand.")


def worker_by_hand(url: str, variables: dict[str, str], cgroup: Path | None = None) -> subprocess.Popen[bytes]:
    """A worker that generates, or in ``cgroup`` one that also trains."""
    command = [sys.executable, "-m", "rookery.cli", "worker", "--connect", url, "--model", MODEL]
    if cgroup is None:
        command += ["--roles", "rollout"]
    else:
        command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh", *command]
    return subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)


# --- a training group of one process and of two -----------------------------------------------------------------------


def fsdp(result: Result, times: int) -> None:
    for rank, what in ((16, "LoRA of rank 16"), (0, "all parameters")):
        spent: dict[int, list[float]] = {1: [], 2: []}
        for processes, seconds in spent.items():  # one after another: two hold more than 10 GB
            arguments = ["-m", "benchmarks.scale.machines", "--child", str(processes), str(rank)]
            group = Contender(f"group {processes}", [sys.executable, *arguments])
            seconds += [group.run(taken=step)["seconds"] for step in range(times + 1)][1:]
            group.close()
        rows = {
            processes: result.add(f"{what}, {processes} processes: a step", seconds, "s", f"{SEQUENCES} x {LENGTH}")
            for processes, seconds in spent.items()
        }
        result.notes.append(f"{what}: two processes take {ratio(rows[2], rows[1]):.2f} of the time of one.")
    result.notes.append(
        "One process has a thread per core; of two the first has as many, the second half of them. On two cores"
        " sharding only costs at this size."
    )


def child(processes: int, rank: int) -> None:
    """A training group as a contender."""
    from benchmarks.lib.child import serve
    from benchmarks.lib.orders import RANK, load_policies, optimizer_steps, unit
    from benchmarks.lib.workload import random_ids

    from rookery import protocol
    from rookery.worker.model.config import DecoderConfig
    from rookery.worker.model.decoder import best_dtype
    from rookery.worker.trainer.fsdp.group import GroupOptions, TrainingGroup
    from rookery.worker.trainer.fsdp.trainer import FsdpTrainer

    model = ours()
    trainer = FsdpTrainer(
        lambda: TrainingGroup(GroupOptions(processes, model, best_dtype())), model, max_rank=RANK, slice_tokens=1024,
        memory_bytes=1 << 40, max_tokens=4096, exports=Path(tempfile.gettempdir()),
    )  # fmt: skip
    load_policies(trainer, 1, rank)
    batch = protocol.TrainingBatch(
        groups=[unit(row) for row in random_ids(SEQUENCES, LENGTH, DecoderConfig.read(model).vocab)]
    )

    def run(taken: int) -> dict[str, Any]:
        return {"seconds": optimizer_steps(trainer, [batch], protocol.Loss(name="cross_entropy"), taken, rank)}

    serve({}, run)


PARTS: dict[str, tuple[str, Callable[[Result, int], None]]] = {
    "workers": ("The same jobs on 1, 2 and 4 workers", workers),
    "ray": ("A worker starts, by Ray and by hand", ray_start),
    "fsdp": ("A training step on one process and on two", fsdp),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    for name in given.only:
        title, measure = PARTS[name]
        print(f"{name}:", flush=True)
        result = Result(f"machines_{name}", title, command())
        measure(result, given.repeats)
        result.save()


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*map(int, sys.argv[2:]))
    else:
        main()
