"""Jobs on rows: their batches, held-out losses, restarts at every moment, and warm starts from and for other jobs."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.peers import ADAPTER, ScriptedWorker, Service, eventually, job_of, members

from rookery import protocol
from rookery.controller.jobs.rows import RowBatch, step_metrics
from rookery.controller.quotas import job_problems
from rookery.controller.training.policy_run import ForwardRequest
from rookery.environments.builtins import find
from rookery.environments.datasets import PromptDataset
from rookery.settings import LimitSettings
from rookery.spec.parsing import SpecError, parse_job
from rookery.storage.repositories import jobs, tenants, versions

ROWS = {
    "demonstrations": [{"prompt": f"{n}?", "completion": f"It is {n}."} for n in range(10)],
    "preferences": [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(10)],
}
HELD_OUT = 3


def row_job(algorithm: str = "sft", **changes: Any) -> dict[str, Any]:
    environment = {"sft": "demonstrations", "dpo": "preferences"}[algorithm]
    job = job_of(
        **{
            "environment": {"id": environment, "rows": ROWS[environment], "eval_last": HELD_OUT},
            "algorithm": {"name": algorithm, "batch_size": 4},
            "stop__steps": 5,
            **changes,
        }
    )
    del job["sampling"]
    return job


async def join(service: Service) -> ScriptedWorker:
    """A worker, and a host that serves rows as a built-in one does."""
    worker = await service.worker(f"worker-{service.lives}").join()
    host = service.host(owner="", environments={f"builtin:{id}": True for id in ROWS}, instance=f"h{service.lives}")

    def prompts(message: protocol.GetPrompts) -> protocol.Prompts:
        built = find(message.environment.removeprefix("builtin:"))(message.options)
        dataset = PromptDataset(built, message.split)
        taken, size = dataset.take(
            message.start, message.count, message.seed, message.shuffle, wrap=message.split == "train"
        )
        return protocol.Prompts(epoch=0, call="", prompts=taken, size=size)

    host.prompts = prompts  # type: ignore[method-assign]
    await host.join()
    return worker


async def submitted(service: Service, **changes: Any) -> str:
    view, _ = await service.controller.submit("alice", row_job(**changes))
    return view.id


def trained(service: Service, job: str) -> bytes:
    """The newest adapter: a hash chain over everything that the policy was trained on."""
    policy = service.database.read(jobs.policies, "alice", job)[0]
    version = service.database.read(versions.versions, "alice", policy.id)[-1]
    return service.artifacts.path(version.hash, ADAPTER).read_bytes()


async def test_a_step_is_a_batch_of_rows_with_its_loss_tokens_and_scale(service: Service) -> None:
    worker = await join(service)
    job = await submitted(service, stop__steps=2, evaluation={"prompts": HELD_OUT})
    await service.ends(job)
    rows = service.database.read(versions.steps, "alice", job)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rows"] == 4 and "reward" not in row and row["lr"] > 0 for row in rows)
    found = [
        (service.chat.decode(prompt), service.chat.decode([t for t, w in zip(m.tokens, m.weights, strict=True) if w]))
        for prompt, m in members(worker)
    ]
    assert all(reply == f"It is {prompt.split('?')[0].split()[-1]}." for prompt, reply in found)
    steps = [op for op in worker.operations if isinstance(op, protocol.OptimStep) and op.adam is not None]
    learned = sum(sum(m.weights) for _, m in list(members(worker))[3:7])  # after the held-out rows of version 0
    assert steps[0].scale == pytest.approx(1 / learned)
    losses = [op.loss.name for op in worker.operations if isinstance(op, protocol.ForwardBackward)]
    assert set(losses) == {"cross_entropy"}
    evaluations = await service.controller.queries.evaluations("alice", job)
    assert [(one.version, one.prompts) for one in evaluations] == [(0, HELD_OUT), (2, HELD_OUT)]
    assert all(one.loss == -one.mean for one in evaluations)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
async def test_calls_of_tools_in_rows_are_shown_and_trained(service: Service, algorithm: str) -> None:
    worker = await join(service)
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds two numbers."}}]
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    asked = [{"role": "user", "content": "2+2?"}]
    calling = {"role": "assistant", "tool_calls": [call]}
    row: dict[str, Any] = {"messages": [*asked, calling], "tools": tools}
    if algorithm == "dpo":
        refusing = {"role": "assistant", "content": "No."}
        row = {
            "input": {"messages": asked, "tools": tools},
            "preferred_output": [calling], "non_preferred_output": [refusing],
        }  # fmt: skip
    environment = {"id": {"sft": "demonstrations", "dpo": "preferences"}[algorithm], "rows": [row]}
    changes: dict[str, Any] = {"environment": environment, "stop__steps": 1}
    shown = await service.controller.dry_run("alice", row_job(algorithm, **changes))
    assert shown.prompts[0].messages == asked
    assert "Adds two numbers." in shown.prompts[0].text and shown.prompts[0].text.endswith("assistant\n")
    view, _ = await service.controller.submit("alice", row_job(algorithm, **changes))
    await service.ends(view.id)
    prompt, member = next(members(worker))
    assert service.chat.encode(shown.prompts[0].text) == prompt
    learned = service.chat.decode([t for t, w in zip(member.tokens, member.weights, strict=True) if w])
    assert learned == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


async def test_dpo_trains_on_pairs_and_compares_with_the_start(service: Service) -> None:
    worker = await join(service)
    first = await submitted(service, stop__steps=1)
    await service.ends(first)
    before = len(worker.operations)
    job = await submitted(
        service, algorithm="dpo", policies={"main": {"warm_start": {"job": first}}}, evaluation={"prompts": 2}
    )
    await service.ends(job)
    passes = [op for op in worker.operations[before:] if isinstance(op, protocol.ForwardBackward)]
    assert {(op.loss.name, op.loss.params["beta"]) for op in passes} == {("dpo", 0.1)}
    start = service.database.read(versions.versions, "alice", service.database.read(jobs.policies, "alice", job)[0].id)[
        0
    ]
    assert {op.reference.hash for op in passes if op.reference} == {start.hash} and all(op.reference for op in passes)
    for op in passes:
        for group in worker.batches[op.op].groups:
            assert [set(member.advantages) for member in group.members] == [{1.0}, {-1.0}]


def _over(service: Service, job: str) -> bool:
    """Whether the process died, or the job ended before."""
    return service.writer.died.is_set() or service.database.read(jobs.get_job, "alice", job).state == "completed"


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
async def test_a_restart_at_any_write_changes_nothing(tmp_path: Path, algorithm: str) -> None:
    """The process dies at the n-th write, is started again, and the job ends with the same bytes."""
    whole = Service(tmp_path / "whole")
    await whole.start()
    await join(whole)
    job = await submitted(whole, algorithm=algorithm, evaluation={"prompts": 2, "every": 2})
    before = whole.writer.calls
    await eventually(partial(_over, whole, job))
    calls = whole.writer.calls - before  # the service goes on writing after the end of the job
    await whole.ends(job)
    wanted = trained(whole, job)
    await whole.close()
    whole.database.close()
    died = 0
    for calls_left in sorted(Random(algorithm).sample(range(calls * 3 // 4), 2)):
        for after in (False, True):
            service = Service(tmp_path / f"{calls_left}-{after}")
            await service.start()
            await join(service)
            job = await submitted(service, algorithm=algorithm, evaluation={"prompts": 2, "every": 2})
            service.writer.calls_left, service.writer.after = service.writer.calls + calls_left, after
            await eventually(partial(_over, service, job))
            died += service.writer.died.is_set()
            await service.crash()
            await service.start()
            await join(service)
            await service.ends(job)
            assert trained(service, job) == wanted, (calls_left, after)
            assert [row["step"] for row in service.database.read(versions.steps, "alice", job)] == [1, 2, 3, 4, 5]
            await service.close()
            service.database.close()
    assert died >= 2, "most of them died in the middle of the job"


async def test_sft_begins_from_rl_and_rl_from_sft(service: Service) -> None:
    await join(service)
    host = await service.host().join()
    rl, _ = await service.controller.submit("alice", job_of(stop__steps=1))
    await service.ends(rl.id)
    tuned = await submitted(service, policies={"main": {"warm_start": {"job": rl.id}}})
    await service.ends(tuned)
    again, _ = await service.controller.submit(
        "alice", job_of(stop__steps=1, policies={"main": {"warm_start": {"job": tuned}}})
    )
    await service.ends(again.id)
    zero = service.database.read(
        versions.versions, "alice", service.database.read(jobs.policies, "alice", again.id)[0].id
    )[0]
    last = service.database.read(
        versions.versions, "alice", service.database.read(jobs.policies, "alice", tuned)[0].id
    )[-1]
    assert service.artifacts.path(zero.hash, ADAPTER).read_bytes() == trained(service, tuned)
    assert last.kept and host.calls


async def test_long_rows_are_cut_and_counted_and_skipped_where_no_tokens_remain(service: Service) -> None:
    await join(service)
    rows = [{"prompt": "a", "completion": "b" * 40}, {"prompt": "a" * 60, "completion": "b"}]
    job = await submitted(
        service, stop__steps=1, algorithm__batch_size=2, algorithm__max_length=50,
        environment={"id": "demonstrations", "rows": rows},
    )  # fmt: skip
    await service.ends(job)
    [row] = service.database.read(versions.steps, "alice", job)
    assert (row["rows"], row["rows_cut"], row["rows_empty"], row["length_max"]) == (2, 2, 1, 50)


async def test_a_pair_that_is_equal_once_it_was_cut_teaches_nothing(service: Service) -> None:
    await join(service)
    rows = [{"prompt": "a", "chosen": "b" * 60 + "c", "rejected": "b" * 60 + "d"},
            {"prompt": "a", "chosen": "b" * 9 + "c", "rejected": "b" * 9 + "d"}]  # fmt: skip
    job = await submitted(
        service, algorithm="dpo", stop__steps=1, algorithm__batch_size=2, algorithm__max_length=50,
        environment={"id": "preferences", "rows": rows},
    )  # fmt: skip
    await service.ends(job)
    [row] = service.database.read(versions.steps, "alice", job)
    assert (row["rows"], row["rows_cut"], row["rows_empty"]) == (2, 1, 1)


async def test_steps_without_a_learned_token_are_named_once_in_the_log(service: Service) -> None:
    await join(service)
    rows = [{"prompt": "a" * 60, "completion": "b"}]
    job = await submitted(
        service, stop__steps=2, algorithm__batch_size=1, algorithm__max_length=50,
        environment={"id": "demonstrations", "rows": rows},
    )  # fmt: skip
    await service.ends(job)
    lines = [row.text for row in service.database.read(tenants.events, "alice", job, 100) if row.kind == "warning"]
    assert (
        len([line for line in lines if "step 1: none of its 1 row has a learned token among its first 50" in line]) == 1
    )
    assert not any("step 2" in line for line in lines)


async def test_a_paused_job_resumes(service: Service) -> None:
    worker = await join(service)
    worker.training.clear()
    job = await submitted(service)
    await service.controller.pause("alice", job)
    worker.training.set()
    await service.controller.resume("alice", job)
    await service.ends(job)
    assert len(service.database.read(versions.steps, "alice", job)) == 5


REFUSED = [
    ({"algorithm": {"name": "sft"}, "environment": {"hosted": "task"}}, "the algorithm sft needs {id: demonstrations"),
    ({"algorithm": {"name": "dpo"}}, "the algorithm dpo needs {id: preferences"),
    ({"algorithm": {"name": "grpo"}}, "the environment demonstrations needs sft"),
    ({"algorithm": {"name": "sft", "group_size": 4}}, "group_size: no effect with sft"),
    ({"algorithm": {"name": "sft", "loss": "ppo"}}, "loss: no effect with sft"),
    ({"algorithm": {"name": "sft", "beta": 0.5}}, "beta: no effect with sft"),
    ({"algorithm": {"name": "grpo", "batch_size": 4}, "environment": {"hosted": "task"}}, "batch_size: no effect"),
    ({"algorithm": {"name": "sft", "batch_size": 0}}, "algorithm.batch_size"),
    ({"sampling": {"max_tokens": 9}}, "sampling: sft samples nothing"),
    ({"stop": {"reward": 0.5}}, "stop.reward: sft samples nothing"),
    ({"stop": {"epochs": 0}}, "stop.epochs"),
    ({"stop": {}}, "at least one of steps, epochs"),
    ({"policies": {"a": {}, "b": {}}}, "policies: sft trains one policy"),
    ({"policies": {"main": {"algorithm": {"kl_weight": 0.1}}}}, "policies.main"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_contradicting_fields_are_refused(changes: dict[str, Any], reason: str) -> None:
    job = row_job() | changes
    with pytest.raises(SpecError) as refused:
        parse_job(job)
    assert reason in str(refused.value)


def test_dpo_trains_no_whole_model_and_divides_no_pair() -> None:
    for policy in ({"full": True, "optimizer": {"lr": 1e-5}}, {"trainers": 2}):
        with pytest.raises(SpecError, match="with dpo, not"):
            parse_job(row_job("dpo") | {"policies": {"main": policy}})
    assert json.dumps(parse_job(row_job("dpo")).model_dump(mode="json"))


def test_memory_of_batches_kept_for_a_replay_is_bounded() -> None:
    limits, refused = LimitSettings(), Counter[str]()
    for commit_every, problems in ((1, 0), (100_000, 1)):
        job = row_job(stop__steps=100_000, checkpoints={"commit_every": commit_every})
        job["algorithm"]["max_length"] = 2048
        found = job_problems(parse_job(job), limits, refused)
        assert len(found) == problems and all("commit_every 100000" in problem for problem in found)


def test_a_loss_that_is_not_finite_is_no_small_loss() -> None:
    batch = RowBatch(ForwardRequest(batch=b"", loss=protocol.Loss(name="cross_entropy")), 4.0, 1, [5], 0, 0)
    assert step_metrics(batch, {"loss:sum": 2.0})["loss"] == 0.5
    assert math.isnan(step_metrics(batch, {"loss:sum": math.nan, "nonfinite": 1.0})["loss"])
    nothing = replace(batch, weight=0.0, lengths=[], empty=batch.rows)
    assert math.isnan(step_metrics(nothing, {"loss:sum": 0.0})["loss"]), "a step that teaches nothing has no loss"
