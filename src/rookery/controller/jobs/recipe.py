"""What a job's spec says to its trainer: the first adapter, the loss, the optimizer at each step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rookery import protocol
from rookery.algorithms.schedules import rate
from rookery.controller.jobs.batch import CompleteGroup, build
from rookery.controller.training.policy_trainer import ForwardRequest
from rookery.spec.job import JobSpec


def first_adapter(
    spec: JobSpec, policy: str, op: str, upload: str, source: protocol.AdapterRef | None
) -> protocol.InitAdapter:
    """Version 0 of ``policy``, uploaded under the ticket ``upload``; ``source`` is what it starts from, if anything."""
    _, wanted = spec.policy
    return protocol.InitAdapter(
        op=op,
        policy=policy,
        rank=wanted.rank,
        alpha=wanted.scale_alpha,
        targets=list(wanted.targets),
        seed=wanted.seed,
        commit=upload,
        source=source,
    )


def forward_backward(spec: JobSpec, groups: Sequence[CompleteGroup]) -> ForwardRequest:
    """What ``groups`` add to the gradient of their step, up to its :func:`~rookery.controller.jobs.batch.scale`."""
    algorithm = spec.algorithm
    return ForwardRequest(
        batch=protocol.encode(build(spec, groups)),
        loss=protocol.Loss(name=algorithm.loss.name, params=algorithm.loss.params),
        temperature=spec.sampling.temperature,
        kl_weight=algorithm.kl_weight,
    )


def adam(spec: JobSpec, step: int) -> protocol.Adam:
    """The optimizer of the next step after ``step``."""
    optimizer = spec.policy[1].optimizer
    schedule = optimizer.schedule
    return protocol.Adam(
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
