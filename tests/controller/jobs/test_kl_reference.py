"""Which version a job's KL penalty compares with, in every operation of a job with a warm start."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.peers import ScriptedWorker, Service, eventually, job_of

from rookery import protocol
from rookery.spec.job import JobSpec
from rookery.storage.repositories import jobs, versions


async def submitted(service: Service, **changes: Any) -> str:
    view, _ = await service.controller.submit("alice", job_of(**changes))
    return view.id


async def source(service: Service) -> str:
    """A completed job to start from."""
    job = await submitted(service, stop__steps=1)
    await service.ends(job)
    return job


def references(*workers: ScriptedWorker) -> set[tuple[str, int] | None]:
    """(hash, version) of what the passes with a KL penalty compared with; None is the base model."""
    passes = [op for worker in workers for op in worker.operations if isinstance(op, protocol.ForwardBackward)]
    penalised = [op for op in passes if op.kl_weight]
    assert penalised
    assert all(op.reference is None or op.reference.hash for op in penalised)
    return {None if op.reference is None else (op.reference.hash, op.reference.version) for op in penalised}


@pytest.mark.parametrize(
    ("algorithm", "warm", "compared"),
    [
        ({}, True, "version 0"),
        ({"kl_reference": "start"}, True, "version 0"),
        ({"kl_reference": "base"}, True, "base"),
        ({}, False, "base"),
        ({"kl_reference": "start"}, False, "base"),
    ],
)
async def test_penalty_compares_with_the_start_or_the_base(
    service: Service, algorithm: dict[str, Any], warm: bool, compared: str
) -> None:
    worker, _ = await service.join()
    start = {"main": {"warm_start": {"job": await source(service)}}} if warm else {}
    more = {"policies": start} if warm else {}
    job = await submitted(
        service, stop__steps=6, algorithm={"group_size": 2, "groups_per_step": 2, "kl_weight": 0.1, **algorithm}, **more
    )
    await service.ends(job)
    zero, *later = service.check_history(job)
    assert references(worker) == ({(zero.hash, 0)} if compared == "version 0" else {None})
    assert not zero.kept and len([version for version in later if version.kept]) >= 3, "the job has ended"


async def test_the_start_survives_restarts_moves_and_retention(service: Service) -> None:
    """Retention keeps one version; the job restarts twice, on another worker each time; its batches are divided."""
    first, host = await service.join()
    policies = {"main": {"warm_start": {"job": await source(service)}, "trainers": 2}}
    workers = [first, await service.worker("second").join()]
    job = await submitted(
        service,
        stop__steps=9,
        algorithm={"group_size": 4, "groups_per_step": 2, "kl_weight": 0.1, "micro_batch": 4},
        checkpoints={"keep_last": 1, "keep_best": False},
        policies=policies,
    )
    for number, steps in enumerate((3, 6)):
        await eventually(lambda steps=steps: len(service.database.read(versions.steps, "alice", job)) >= steps)
        policy = service.database.read(jobs.policies, "alice", job)[0]
        assert service.database.read(versions.versions, "alice", policy.id)[0].kept
        await service.crash()
        await service.start()
        workers += [await service.worker(f"later-{number}-{i}").join() for i in range(2)]
        await service.reconnect(host).join()
    await service.ends(job)
    zero = service.check_history(job)[0]
    assert references(*workers) == {(zero.hash, 0)}
    assert sum(bool(worker.operations) for worker in workers) >= 3


def test_full_training_has_no_penalty() -> None:
    whole = {"full": True, "optimizer": {"lr": 1e-5}}
    with pytest.raises(ValueError, match=r"algorithm\.kl_weight: not with policies\.main\.full, which keeps no"):
        JobSpec.model_validate(job_of(algorithm__kl_weight=0.1, policies__main=whole))


def test_only_a_penalty_against_a_warm_start_needs_the_weights_of_version_0() -> None:
    warm = {"algorithm__kl_weight": 0.1, "policies__main__warm_start": {"job": "job-1"}}
    assert JobSpec.model_validate(job_of(**warm)).compares_with_start
    for changes in ({"algorithm__kl_weight": 0}, {"algorithm__kl_reference": "base"}, {"policies__main": {}}):
        assert not JobSpec.model_validate(job_of(**{**warm, **changes})).compares_with_start
