"""Measures a machine with one base model: ``python -m rookery.worker.profile --model NAME --name MACHINE``.

Prints the machine's entry of a fleet file as JSON. It loads the model as a worker does and times decode steps, prefill
and training through the worker's engine and trainer, so a profile holds for the settings that it was made with.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rookery import protocol
from rookery.aio import INTERRUPTED
from rookery.errors import EXIT_REFUSED, UserError, to_stderr
from rookery.folders import temporary_folder
from rookery.settings import WORKER_SETTINGS, Settings
from rookery.spec.fleet import PROFILED_RANK
from rookery.spec.policy import TARGETS
from rookery.telemetry.log import log_to_stderr
from rookery.worker import device, teams
from rookery.worker.core import WorkerCore, load_core
from rookery.worker.engine.native.engine import PREFILL_TOKENS
from rookery.worker.memory import MemoryBudget
from rookery.worker.model.convert import prepare
from rookery.worker.trainer.packed_trainer import PackedTrainer

log = logging.getLogger("rookery.worker")

POLICY = "profile"

RANK, ALPHA = PROFILED_RANK, 32.0
"""Of the LoRA that is trained and served: the defaults of a policy."""

PROMPT_TOKENS = 32
"""Of the requests whose decode steps are timed."""

DECODE_STEPS = 24
"""Timed steps for each number of rows, of which the median counts."""

SEQUENCES, SEQUENCE_TOKENS = 8, 128
"""Of a timed optimizer step: the smallest batch at which the packed passes are full."""

TRAIN_STEPS = 3
"""Timed optimizer steps, after one that fills caches."""


def measure(model: str, settings: Settings) -> dict[str, Any]:
    """The fields of :class:`~rookery.spec.machine.Machine` that can be measured here: speeds, the sizes of the KV cache
    and of a version, and the memory of a worker that divides it. Seconds, tokens and bytes."""
    began = time.perf_counter()
    teams.reserve(settings.worker.threads)
    folder = prepare(model, settings.cache)
    core = load_core(folder, settings.replace(slo_gate=False), lambda: None)  # whose slices need no second measurement
    loaded = time.perf_counter() - began
    with temporary_folder() as scratch:
        generation = _generation(core, settings)
        training, state = _training(core, settings, Path(scratch))
        found = {"load": round(loaded, 1)} | generation | training
        if core.budget is None:
            return found
        tokens, train_slice = generation.get("cache_tokens", 0), training["train_slice"]
        return found | {"memory": shares(core.budget, tokens, train_slice, state)}


def shares(budget: MemoryBudget, cache_tokens: int, train_slice: int, state: int) -> dict[str, int]:
    """A budget as the memory of a fleet file: activations have their whole share, however long a slice is, and states
    no more than theirs. ``cache_tokens``: of the whole cache, 0 if unknown. ``state``: bytes of one."""
    return {
        "total": budget.total,
        "base": budget.base,
        "cache_token": budget.kv_cache // cache_tokens if cache_tokens else 0,
        "train_token": budget.activations // train_slice,
        "states": budget.training_states,
        "state": state,
    }


def _generation(core: WorkerCore, settings: Settings) -> dict[str, Any]:
    most = settings.engine.max_rows
    rows, curve = 1, []
    while rows < most:
        curve.append((rows, _decode_step(core, rows)))
        rows *= 4
    curve.append((most, _decode_step(core, most)))
    for i in range(1, len(curve)):  # noise must not make a larger batch look faster
        curve[i] = curve[i][0], max(curve[i][1], curve[i - 1][1])
    slice_tokens = min(PREFILL_TOKENS, core.engine.limits.max_context // 2)
    prefill = _prefill(core, slice_tokens)
    return {
        "rows": most,
        "decode": [[count, round(seconds, 6)] for count, seconds in curve],
        "prefill_token": round(prefill / slice_tokens, 8),
        "prefill_slice": slice_tokens,
        "context": core.engine.limits.max_context,
    } | ({"cache_tokens": tokens} if (tokens := core.engine.free_tokens) else {})


def _run(core: WorkerCore, count: int, prompt: int, tokens: int) -> list[float]:
    """Seconds of each step of the engine while ``count`` requests generate ``tokens`` tokens each."""
    for number in range(count):
        core.engine.submit(
            protocol.Generate(
                request=f"profile-{number}", adapter=None, prompt=[1 + (number + i) % 97 for i in range(prompt)],
                shared_prefix=0, max_tokens=tokens, temperature=1.0, seed=number, stop_tokens=[],
            )
        )  # fmt: skip
    seconds = []
    began = time.perf_counter()
    while core.engine.step():
        core.engine.drain()
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return seconds


def _decode_step(core: WorkerCore, rows: int) -> float:
    return statistics.median(_run(core, rows, PROMPT_TOKENS, DECODE_STEPS)[-DECODE_STEPS + 1 :])


def _prefill(core: WorkerCore, tokens: int) -> float:
    _run(core, 1, tokens, 1)
    return min(sum(_run(core, 1, tokens, 1)) for _ in range(TRAIN_STEPS))


def _training(core: WorkerCore, settings: Settings, scratch: Path) -> tuple[dict[str, Any], int]:
    """The fields of training, and the bytes of a training state in memory."""
    first = protocol.InitAdapter(op="", policy=POLICY, rank=RANK, alpha=ALPHA, targets=list(TARGETS), seed=0, upload="")
    start = protocol.AdapterRef(policy=POLICY, version=0, hash=POLICY, rank=RANK, alpha=ALPHA)
    initial = scratch / "initial"
    initial.mkdir()
    trainer = core.queue.trainer_of(RANK)
    trainer.initial_version(first, None).write(initial)
    trainer.load(POLICY, 1, start, initial)
    core.engine.add_adapter(start, initial)
    passes, optimizers = [], []
    for taken in range(TRAIN_STEPS + 1):
        step: dict[str, Any] = {"policy": POLICY, "lease": 1, "parent": start, "steps": taken, "tenant": ""}
        batch = protocol.TrainingBatch(groups=[_sequence(number) for number in range(SEQUENCES)])
        loss = protocol.Loss(name="cross_entropy")
        trainer.forward_backward(
            protocol.ForwardBackward(op="pass", batch_ticket="", loss=loss, temperature=1.0, **step),
            batch,
        )
        passes.append(_seconds(core))
        trainer.optim_step(protocol.OptimStep(op="step", operations=1, adam=protocol.Adam(lr=1e-4, clip=1.0), **step))
        optimizers.append(_seconds(core))
    state = core.queue.memory()["training_states"].used
    commit: dict[str, Any] = {"policy": POLICY, "lease": 1, "parent": start, "steps": TRAIN_STEPS + 1, "tenant": ""}
    trainer.optim_step(protocol.OptimStep(op="commit", adam=None, upload="commit", **commit))
    while core.queue.step():
        pass
    ((committed, export),) = core.queue.drain()
    written = scratch / "committed"
    written.mkdir()
    assert export is not None, committed.error
    sizes = {name: (written / name).stat().st_size for name in export.write(written)}
    adapter = sum(size for name, size in sizes.items() if name.startswith("adapter"))
    return {
        "train_token": round(statistics.median(passes[1:]) / (SEQUENCES * SEQUENCE_TOKENS), 8),
        "train_slice": trainer.slice_tokens if isinstance(trainer, PackedTrainer) else settings.training.slice_tokens,
        "optimizer": round(statistics.median(optimizers[1:]), 4),
        "adapter_bytes": adapter,
        "state_bytes": sum(sizes.values()) - adapter,
    }, state


def _seconds(core: WorkerCore) -> float:
    """The seconds until the trainer has run its queue. Raises ``RuntimeError`` for an operation that fails."""
    began = time.perf_counter()
    while core.queue.step():
        pass
    device.finish(torch.device(core.implementation.device))
    seconds = time.perf_counter() - began
    for done, _ in core.queue.drain():
        if done.error:
            raise RuntimeError(done.error)
    return seconds


def _sequence(number: int) -> protocol.SharedPrefixGroup:
    tokens = [1 + (7 * number + i) % 97 for i in range(SEQUENCE_TOKENS)]
    own = len(tokens) - 1
    member = protocol.GroupMember(
        tokens=tokens[1:], logprobs=[0.0] * own, advantages=[1.0] * own, weights=[1 / own] * own
    )
    return protocol.SharedPrefixGroup(prompt=tokens[:1], members=[member])


def main() -> int:
    parser = argparse.ArgumentParser(prog="rookery profile", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on Ctrl-C removes what was begun
    try:
        settings = Settings.load(uses=WORKER_SETTINGS)
        log_to_stderr(settings.server.log_level)
        print(json.dumps({"name": given.name} | measure(given.model, settings)))
    except UserError as error:
        to_stderr(error)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
