"""Merged tails: the rollouts of a worker that trains may move into another worker's batch (JigsawRL, arXiv 2604.23838).
Pure.

Beside training they get half of the time, and take half of training's. :func:`merge` decides where the rules of
:mod:`rookery.scheduling.balancing` move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rookery.scheduling.balancing import MigrationPlan
from rookery.scheduling.costs import CostTable
from rookery.scheduling.divided_rollout import DecodingWorker
from rookery.scheduling.pipelines import Planner, SubStage, Timeline


@dataclass(frozen=True, slots=True)
class WorkerRollouts:
    """The rollouts that a worker executes."""

    name: str
    site: DecodingWorker
    steps: int
    """Decode steps until the last of them ends, as far as can be known."""
    tokens: int
    """Of prompts and texts: another worker prefills them."""
    train_seconds: float = 0.0
    """Predicted rest of the worker's training."""


def merge(tail: WorkerRollouts, taker: WorkerRollouts, costs: CostTable, planner: Planner) -> MigrationPlan | None:
    """The rollouts of ``tail``, whose worker trains, resume in the batch of ``taker``, whose worker does not: if that
    lowers the predicted finish of all, prefilling included, by the planner's hysteresis. ``costs`` are the taker's."""
    rows, others = tail.site.executing, taker.site.executing
    here, both = costs.predict("decode", rows), costs.predict("decode", rows + others)
    prefill = costs.predict("prefill", tail.tokens)
    memory = tail.tokens + rows * tail.steps
    if not (rows and here and prefill) or tail.site.pending or taker.site.pending:
        return None
    if taker.site.free < rows or taker.site.free_tokens < memory:
        return None
    stages = [
        SubStage("tail", "decode tail", tail.steps * here, worker=0, move_seconds=prefill),
        SubStage("training", "train", tail.train_seconds, worker=0),
    ]
    slow = {}
    if others:
        alone = costs.predict("decode", others)
        slow["decode batch", "decode tail"] = both / alone, both / here
        stages.append(SubStage("batch", "decode batch", taker.steps * alone, worker=1))
    left = {number: stage.seconds for number, stage in enumerate(stages)}
    action = planner.choose(Timeline(stages, 2, slow, left=left, at=dict(zip(left, (0, 0, 1), strict=False))))
    return MigrationPlan(tail.name, taker.name, rows, executing=True) if action == (0, 1, True) else None
