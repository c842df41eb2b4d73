"""Merged tails: the rollouts of a worker that trains may move into another worker's batch (JigsawRL, arXiv 2604.23838).
Pure.

Beside training, or in turns with it, they are slower, and so is training. :func:`merge` decides by the planner's
prediction (:mod:`rookery.scheduling.pipelines`) where the rules of :mod:`rookery.scheduling.balancing` move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from rookery.scheduling.balancing import MigrationPlan
from rookery.scheduling.costs import CostTable
from rookery.scheduling.divided_rollout import DecodingWorker
from rookery.scheduling.pipelines import (
    BUCKETS,
    HYSTERESIS,
    TAKING_TURNS,
    TURNS,
    JobStages,
    LaneCosts,
    SlowdownTable,
    Stage,
    State,
    complete,
)


@dataclass(frozen=True, slots=True)
class WorkerRollouts:
    """The rollouts that a worker executes."""

    name: str
    decoder: DecodingWorker
    steps: int
    """Decode steps until the last of them ends, as far as can be known."""
    tokens: int
    """Tokens of prompts and texts: another worker prefills them."""
    train_seconds: float = 0.0
    """Predicted rest of the worker's training."""
    slowdowns: tuple[float, float] = TAKING_TURNS
    """The slowdowns of its rollouts and its training while it has both."""


def merge(tail: WorkerRollouts, taker: WorkerRollouts, costs: CostTable) -> MigrationPlan | None:
    """The rollouts of ``tail``, whose worker trains, resume in the batch of ``taker``, whose worker does not: if that
    lowers the predicted finish of all, prefilling included, by the planner's hysteresis. ``costs`` are the taker's."""
    rows, others = tail.decoder.executing, taker.decoder.executing
    prefill = costs.predict("prefill", tail.tokens)
    memory = tail.tokens + rows * tail.steps
    if not (rows and tail.train_seconds and prefill and costs.predict("decode", rows)):
        return None
    if tail.decoder.pending or taker.decoder.pending or taker.decoder.free < rows or taker.decoder.free_tokens < memory:
        return None
    rest = _decode(tail, costs)
    batch: list[JobStages] = [(_decode(taker, costs),)] if others else []
    training: JobStages = (Stage("train", tail.train_seconds),)
    stays = _cost([[(rest,), training], batch], costs, tail.slowdowns)
    moves = _cost([[training], [(Stage("prefill", prefill), rest), *batch]], costs, tail.slowdowns)
    gains = stays - moves > HYSTERESIS * prefill
    return MigrationPlan(tail.name, taker.name, rows, executing=True) if gains else None


def _decode(rollouts: WorkerRollouts, costs: CostTable) -> Stage:
    rows = rollouts.decoder.executing
    return Stage("decode", rollouts.steps * costs.predict("decode", rows), rows)


def _cost(workers: list[list[JobStages]], costs: CostTable, slowdowns: tuple[float, float]) -> float:
    """The finish of the last plus the mean finish of all stages on these workers."""
    table, mode = SlowdownTable(), TURNS
    if slowdowns != TAKING_TURNS:
        mode = 1
        for rows in BUCKETS:
            table.record(mode, "decode", rows, engine=slowdowns[0], trainer=slowdowns[1])
    lanes = LaneCosts(table, lambda rows: costs.predict("decode", rows))
    ends = [end for chains in workers for end in complete(State(tuple(chains)), mode, lanes).ends]
    return max(ends) + fmean(ends)
