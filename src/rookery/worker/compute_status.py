"""The state of the compute thread for other threads.

It has two halves, the engine's and the trainer's: each is published by the thread that owns that part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rookery import protocol
from rookery.scheduling.worker_time import TimeSlice
from rookery.worker.core import WorkerCore

IDLE = protocol.Heartbeat(
    progress=0, active=0, waiting=0, training=0, generated=0, decode_seconds=0.0, train_seconds=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class ComputeStatus:
    """State of the compute thread, consistent and taken between two slices. New work is in it before the slice that
    computes it, so a stuck slice shows as work without progress."""

    beat: protocol.Heartbeat = IDLE
    """The heartbeat, as far as this thread knows it."""
    adapters: frozenset[str] = frozenset()
    """Hashes of the adapters in memory."""


@dataclass(frozen=True)
class Half:
    """The engine's or the trainer's part of the status."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the heartbeat."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of each tenant in the engine."""
    adapters: frozenset[str] = frozenset()
    """Hashes of the adapters in the engine's memory."""


def engine_half(core: WorkerCore, used: TimeSlice) -> Half:
    """``used``: the time of the engine."""
    engine, gate, adapters = core.engine, core.gate, frozenset(core.engine.adapters())
    fields = {
        "active": engine.active, "waiting": engine.waiting, "generated": engine.generated,
        "decode_seconds": used.seconds, "interactive": len(gate.tracked), "slo_slack": gate.least_slack(),
        "free_tokens": engine.free_tokens, "costs": gate.costs.curves,
    }  # fmt: skip
    gauges = {**engine.gauges(), **gate.gauges(), "adapters_in_memory": len(adapters)}
    memory = {part: (use.used, use.budget) for part, use in engine.memory().items()}
    return Half(fields, gauges, memory, engine.tenants(), adapters)


def trainer_half(core: WorkerCore, used: TimeSlice, gauges: Mapping[str, float]) -> Half:
    """``used``: the time of the trainer; ``gauges``: in addition to those of its queue."""
    return Half(
        {"training": core.queue.pending, "train_seconds": used.seconds},
        {**core.queue.gauges(), **gauges},
        {part: (use.used, use.budget) for part, use in core.memory_of_training().items()},
    )


def beat_of(engine: Half, trainer: Half, **fields: Any) -> protocol.Heartbeat:
    """The heartbeat of both halves with these ``fields``."""
    return msgspec.structs.replace(
        IDLE,
        memory_parts={**engine.memory, **trainer.memory},
        gauges={**engine.gauges, **trainer.gauges},
        **engine.fields,
        **trainer.fields,
        **fields,
    )
