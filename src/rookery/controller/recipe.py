"""What a job's spec says to its trainer: the first adapter, the loss, the optimizer at each step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rookery import wire
from rookery.algorithms.schedules import rate
from rookery.controller.batch import CompleteGroup, build
from rookery.controller.trainee import Forward
from rookery.spec import JobSpec


def first_adapter(spec: JobSpec, policy: str, op: str, upload: str, source: wire.AdapterRef | None) -> wire.InitAdapter:
    """Version 0 of ``policy``, uploaded under the ticket ``upload``; ``source`` is what it starts from, if anything."""
    _, wanted = spec.policy
    return wire.InitAdapter(
        op=op,
        policy=policy,
        rank=wanted.rank,
        alpha=wanted.scale_alpha,
        targets=list(wanted.targets),
        seed=wanted.seed,
        commit=upload,
        source=source,
    )


def forward_backward(spec: JobSpec, groups: Sequence[CompleteGroup]) -> Forward:
    """What ``groups`` add to the gradient of their step, up to its :func:`~rookery.controller.batch.scale`."""
    algorithm = spec.algorithm
    return Forward(
        batch=wire.encode(build(spec, groups)),
        loss=wire.Loss(name=algorithm.loss.name, params=algorithm.loss.params),
        temperature=spec.sampling.temperature,
        kl_weight=algorithm.kl_weight,
    )


def adam(spec: JobSpec, step: int) -> wire.Adam:
    """The optimizer of the next step after ``step``."""
    optimizer = spec.policy[1].optimizer
    schedule = optimizer.schedule
    return wire.Adam(
        lr=rate(
            schedule.name,
            step,
            lr=optimizer.lr,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps or spec.stop.steps,
            min_ratio=schedule.min_ratio,
            phi=schedule.phi,
        ),
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip=optimizer.grad_clip,
    )
