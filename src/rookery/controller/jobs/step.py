"""One optimizer step: what its groups become on the wire, and what accumulates until the optimizer is called. Pure.

The groups of a step are differentiated in micro-batches, as they become complete. The gradients add up in the trainer;
normalisation that depends on the whole step is applied by the optimizer step. So the step's gradient is the same sum
however its groups were divided. Nothing here is durable: the groups stay ready in the database until the step's commit
consumes them all at once, so a crash in between takes every micro-batch back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery import protocol
from rookery.algorithms.schedules import rate
from rookery.controller.jobs.batch import CompleteGroup, describe, make_batch, step_scale
from rookery.controller.training.policy_trainer import ForwardRequest
from rookery.spec.job import JobSpec


def forward_backward(spec: JobSpec, groups: Sequence[CompleteGroup]) -> ForwardRequest:
    """The operation that adds the gradient of ``groups``, before :func:`~rookery.controller.jobs.batch.step_scale`."""
    algorithm = spec.algorithm
    return ForwardRequest(
        batch=protocol.encode(make_batch(spec, groups)),
        loss=protocol.Loss(name=algorithm.loss.name, params=algorithm.loss.params),
        temperature=spec.sampling.temperature,
        kl_weight=algorithm.kl_weight,
    )


def adam(spec: JobSpec, step: int) -> protocol.Adam:
    """The optimizer's parameters for the step after ``step`` others."""
    optimizer = spec.policy[1].optimizer
    schedule = optimizer.schedule
    lr = rate(
        schedule.name,
        step,
        lr=optimizer.lr,
        warmup_steps=schedule.warmup_steps,
        total_steps=schedule.total_steps or spec.stop.steps,
        min_ratio=schedule.min_ratio,
        phi=schedule.phi,
    )
    return protocol.Adam(
        lr=lr, beta1=optimizer.beta1, beta2=optimizer.beta2, eps=optimizer.eps, weight_decay=optimizer.weight_decay,
        clip=optimizer.grad_clip,
    )  # fmt: skip


@dataclass
class StepAccumulator:
    """The step after ``number`` others."""

    spec: JobSpec
    number: int
    groups: list[CompleteGroup] = field(default_factory=list)
    """Groups taken for the step so far."""
    waiting_seconds: float = 0.0
    """Seconds for which the step waited for groups …"""
    training_seconds: float = 0.0
    """… and for its trainer."""
    _sums: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Groups that the step still lacks."""
        return self.spec.algorithm.groups_per_step - len(self.groups)

    @property
    def scale(self) -> float:
        """The factor of the summed gradient, once nothing is missing."""
        return step_scale(self.spec, self.groups)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the trainer's metrics of a micro-batch: sums, except maxima where the name ends in ``:max``."""
        for name, value in metrics.items():
            known = self._sums.get(name)
            if known is not None:
                value = max(known, value) if name.endswith(":max") else known + value
            self._sums[name] = value

    def group_metrics(self) -> dict[str, float]:
        """Metrics of the step's groups (:func:`~rookery.controller.jobs.batch.describe`)."""
        return describe(self.groups, self.number)

    def trainer_metrics(self) -> dict[str, float]:
        """The trainer's metrics of the whole step, with the loss scaled as the gradient is."""
        metrics = dict(self._sums)
        if "loss:sum" in metrics:
            metrics["loss:sum"] *= self.scale
        return metrics
