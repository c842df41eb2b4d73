"""Versions on one machine: a hand-over against a pull; and what weights change from step to step.

``python -m benchmarks.scale.weights_direct [--only handover delta lora]``.

* *handover*: a trainer's worker writes a version of 5 MB (an adapter) or of 270 MB (all weights of 135M parameters in
  bfloat16). An engine's worker of the same cache takes it over, or one with another cache pulls it from the service
  after the upload. Both check the hash. Real transfers over HTTP on the loopback interface.
* *delta*: optimizer steps of the shipped trainer on all parameters of SmolLM2-135M, in bfloat16 with float32 masters,
  on text. Of each version: the share of bfloat16 words that differ from the version before, the bytes of the shipped
  difference, the seconds to write and to apply it. From that, the bandwidth below which a difference is quicker.
* *lora*: the same steps on an adapter, whose versions are float32: the share of its 16-bit words that differ, and
  whether a difference is worth writing. A result by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib.harness import ROOT, Result, command
from benchmarks.lib.model import ours
from tests.support.dialled import Dialled
from tests.worker.transfer.test_client import transfers

from rookery import protocol
from rookery.simulation.fakes.service import MEMORY
from rookery.spec.policy import TARGETS
from rookery.worker.transfer.delta import apply_delta, write_delta

SIZES = {5: 5, 270: 3}
"""Megabytes, and how many versions of that size."""
RATES = (1e-6, 5e-6, 2e-5)
RANK = 16
LORA_RATES = (1e-6, 1e-5, 2e-4)
"""Learning rates of adapters, two of them far below the usual ones."""
STEPS = 4
"""Of each learning rate; the first ones, in which Adam has no history, are not counted."""
COUNTED = 2
SEQUENCES, LENGTH = 8, 192
LINKS = (1e9, 10e9)
"""Bits per second."""


async def hand_over(folder: Path, size: int) -> dict[str, float]:
    """One version: seconds until an engine's worker has it whole and verified, and the bytes that moved for that."""
    content = {"adapter_config.json": b"{}", "adapter_model.safetensors": os.urandom(size)}

    def write(to: Path) -> None:
        for name, data in content.items():
            (to / name).write_bytes(data)

    with Dialled(folder / "artifacts") as service:
        trainer, near = (transfers(service, folder, capacity=1 << 32) for _ in range(2))
        far = transfers(service, folder / "far", capacity=1 << 32)
        seconds: dict[str, float] = {}
        begun = 0.0

        async def staged(digest: str, at: Path) -> None:
            nonlocal begun
            begun = time.perf_counter()
            await near.receive_handed(digest, at.name)
            seconds["handed over"] = time.perf_counter() - begun

        ticket = service.tickets.upload()
        manifest = await trainer.upload(ticket, write, staged)
        staging = service.tickets.staging(ticket)
        assert staging is not None
        assert (await asyncio.to_thread(staging.commit)).hash == manifest.hash
        ref = service.ref(manifest, 1)
        trainer.adopt(ref)
        committed = time.perf_counter()
        async with far.pulled(ref):
            seconds["pulled"] = time.perf_counter() - committed
        seconds["uploaded and pulled"] = time.perf_counter() - begun - seconds["handed over"]
        async with near.pulled(ref):
            pass
        assert near.bytes_from_service + near.bytes_from_peers == 0
        seconds["bytes pulled"] = far.bytes_from_service
        for one in (trainer, near, far):
            await one.close()
    return seconds


def measure_hand_over(result: Result) -> None:
    for mega, times in SIZES.items():
        runs = []
        for _ in range(times):
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                runs.append(asyncio.run(hand_over(Path(folder), mega * 1_000_000)))
        moved = {"handed over": 0.0, "pulled": runs[0]["bytes pulled"], "uploaded and pulled": 2 * mega * 1e6}
        for what, size in moved.items():
            result.add(f"{mega} MB {what}", [run[what] for run in runs], "s", f"{size / 1e6:.0f} MB over sockets")
        shares = [run["uploaded and pulled"] / run["handed over"] for run in runs]
        result.judge(f"{mega} MB: a hand-over is quicker than upload and pull", f"{statistics.median(shares):.1f} x",
                     min(shares) > 1)  # fmt: skip


def text_batch() -> protocol.TrainingBatch:
    """Sequences of the documentation's text."""
    from benchmarks.lib.orders import unit

    from rookery.tokenization.chat import Chat

    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))[:40_000]
    ids = Chat.load(ours()).encode(text)[: SEQUENCES * LENGTH]
    rows = [ids[at : at + LENGTH] for at in range(0, SEQUENCES * LENGTH, LENGTH)]
    return protocol.TrainingBatch(groups=[unit(row) for row in rows])


@contextmanager
def training(rank: int) -> Iterator[Callable[[float], list[dict[str, float]]]]:
    """The figures of the counted steps at a learning rate, of an adapter of this rank, or with 0 of all parameters."""
    from rookery.worker.model.decoder import best_dtype
    from rookery.worker.trainer.fsdp.group import GroupOptions, TrainingGroup
    from rookery.worker.trainer.fsdp.trainer import FsdpTrainer

    model = ours()
    batch = text_batch()
    group = TrainingGroup(GroupOptions(1, model, best_dtype()))
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        trainer = FsdpTrainer(
            lambda: group, model, max_rank=RANK, slice_tokens=1024, memory_bytes=1 << 40,
            max_tokens=4096, exports=folder,
        )  # fmt: skip

        def steps(lr: float) -> list[dict[str, float]]:
            place = folder / f"{lr:g}"
            figures = [steps_of(trainer, batch, lr, place, number, rank) for number in range(STEPS)]
            shutil.rmtree(place)
            trainer.evict(f"lr-{lr:g}")
            return figures[COUNTED:]

        yield steps
    group.close()


def measure_lora(result: Result) -> None:
    with training(RANK) as steps:
        for lr in LORA_RATES:
            figures = steps(lr)
            what = f"LoRA of rank {RANK}, lr {lr:g}"
            result.add(f"{what}: changed 16-bit words", [100 * one["changed"] for one in figures], "%", "per step")
            written, size = sum("equal" in one for one in figures), figures[0]["size"] / 1e6
            result.judge(f"{what}: no difference is worth writing", f"{written} of {len(figures)} written",
                         written == 0, f"of {size:.0f} MB")  # fmt: skip


def measure_deltas(result: Result) -> None:
    with training(0) as steps:
        for lr in RATES:
            figures = steps(lr)
            size = figures[0]["size"]
            result.add(f"lr {lr:g}: changed words", [100 * one["changed"] for one in figures], "%", "per step")
            result.add(f"lr {lr:g}: difference", [one["bytes"] / 1e6 for one in figures], "MB", f"of {size / 1e6:.0f}")
            work = [one["write"] + one["apply"] for one in figures]
            result.add(f"lr {lr:g}: writing and applying it", work, "s")
            saved = statistics.median(size - one["bytes"] for one in figures) * 8
            result.add(f"lr {lr:g}: quicker than the file below", [saved / statistics.median(work) / 1e9], "Gbit/s")
            for link in LINKS:
                whole = size * 8 / link
                spent = [one["bytes"] * 8 / link + one["write"] + one["apply"] for one in figures]
                result.add(
                    f"lr {lr:g}: over {link / 1e9:g} Gbit/s, of the file's time", [t / whole for t in spent], "x"
                )
            result.judge(f"lr {lr:g}: the receiver's hash is the trainer's", *hashes(figures))


def steps_of(
    trainer: Any, batch: protocol.TrainingBatch, lr: float, folder: Path, number: int, rank: int
) -> dict[str, float]:
    """One optimizer step, committed, and its difference to the version before."""
    policy, alpha = f"lr-{lr:g}", 2.0 * rank
    parent = protocol.AdapterRef(policy=policy, version=number, hash=f"v{number}", rank=rank, alpha=alpha)
    if number == 0:
        first = folder / "v0"
        first.mkdir(parents=True)
        targets = list(TARGETS) if rank else []
        op = protocol.InitAdapter(op="init", policy=policy, rank=rank, alpha=alpha, targets=targets, seed=0)
        trainer.initial_version(op, None).write(first)
        trainer.load(policy, 1, parent, first)
    common: dict[str, Any] = {"policy": policy, "lease": 1, "parent": parent, "steps": 0}
    loss = protocol.Loss(name="cross_entropy")
    trainer.forward_backward(
        protocol.ForwardBackward(op="pass", batch_ticket="", loss=loss, temperature=1.0, operations=0, **common), batch
    )
    adam = protocol.Adam(lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip=1.0)
    trainer.optim_step(
        protocol.OptimStep(op="step", adam=adam, scale=1 / SEQUENCES, operations=1, upload=f"c{number}", **common)
    )
    while trainer.queue.step():
        pass
    results = trainer.queue.drain()
    assert not any(one.done.error for one in results), results
    new = folder / f"v{number + 1}"
    new.mkdir()
    results[-1].export.write(new)
    made = protocol.AdapterRef(policy=policy, version=number + 1, hash=f"v{number + 1}", rank=rank, alpha=alpha)
    trainer.mark_committed(policy, 1, made)
    figures = difference(folder / f"v{number}", new, "adapter_model.safetensors" if rank else "model.safetensors")
    shutil.rmtree(folder / f"v{number}")  # with its optimizer state a version has 2 GB
    return figures


def hashes(figures: list[dict[str, float]]) -> tuple[str, bool | None]:
    """In words, and whether all are equal: of the versions of which a difference was written."""
    written = [one["equal"] for one in figures if "equal" in one]
    if not written:
        return "no difference written", None
    return f"{sum(map(int, written))} of {len(written)} equal", all(written)


def difference(before: Path, after: Path, name: str) -> dict[str, float]:
    base, new = before / name, after / name
    old, words = (np.memmap(path, np.uint16, "r") for path in (base, new))
    changed = float(np.count_nonzero(old != words)) / len(words)
    delta, made = after / "delta", after / "made"
    begun = time.perf_counter()
    worth = write_delta(base, new, delta)
    written = time.perf_counter()
    if worth:
        apply_delta(base, delta, made)
    applied = time.perf_counter()
    size = float(new.stat().st_size)
    figures = {
        "changed": changed, "size": size, "bytes": float(delta.stat().st_size) if worth else size,
        "write": written - begun, "apply": applied - written,
    }  # fmt: skip
    if worth:
        figures["equal"] = hashlib.sha256(made.read_bytes()).digest() == hashlib.sha256(new.read_bytes()).digest()
        made.unlink()
        delta.unlink()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ["handover", "delta", "lora"]
    parser.add_argument("--only", nargs="*", default=parts, choices=parts)
    given = parser.parse_args()
    if "lora" in given.only:
        adapters = Result("weights_lora", "Differences between versions of an adapter", command())
        measure_lora(adapters)
        adapters.save()
    result = Result("weights_direct", "Versions on one machine, and differences between versions", command())
    if "handover" in given.only:
        measure_hand_over(result)
    if "delta" in given.only:
        measure_deltas(result)
    result.save()


if __name__ == "__main__":
    main()
