"""More machines: a worker's start by Ray and by hand, and a training step on two processes and on one.

    python -m benchmarks.scale.machines [--only PART ...]       (the part ``ray`` in an environment with rookery[ray])

Both parts use the real model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import MODEL, Result, command, options, ratio, versions
from benchmarks.lib.model import ours
from benchmarks.lib.service import service, until_served
from tests.chaos.driver import wait_until

from rookery.settings import TOKEN_VARIABLE

SEQUENCES, LENGTH = 4, 96


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
        with service(**settings) as bench:  # type: ignore[arg-type]

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


def worker_by_hand(url: str, token: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rookery.cli", "worker", "--connect", url, "--model", MODEL, "--roles", "rollout"]
    return subprocess.Popen(command, env={**os.environ, **token}, stderr=subprocess.DEVNULL)


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
        base_model=MODEL, memory_bytes=1 << 40, max_tokens=4096, exports=Path(tempfile.gettempdir()),
    )  # fmt: skip
    load_policies(trainer, 1, rank)
    batch = protocol.TrainingBatch(
        groups=[unit(row) for row in random_ids(SEQUENCES, LENGTH, DecoderConfig.read(model).vocab)]
    )

    def run(taken: int) -> dict[str, Any]:
        return {"seconds": optimizer_steps(trainer, [batch], protocol.Loss(name="cross_entropy"), taken, rank)}

    serve({}, run)


PARTS: dict[str, tuple[str, Callable[[Result, int], None]]] = {
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
