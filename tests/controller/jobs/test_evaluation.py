"""Evaluations: the prompts that all versions of a job answer."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from tests.controller.jobs.test_policies import debate, submit
from tests.support.peers import HANG, ScriptedHost, Service, eventually

from rookery import protocol
from rookery.storage.repositories import versions as version_rows


async def test_all_versions_of_all_policies_answer_the_same_prompts(service: Service) -> None:
    """Also where the split gives others each time that it is asked, and evaluations begin before one is stored."""
    _, host = await service.join(script=debate)
    usual, asked = host.prompts, count()

    def prompts(message: protocol.GetPrompts) -> protocol.Prompts:
        found = usual(message)
        if message.split == "train":
            return found
        return msgspec.structs.replace(found, prompts=[b"[%d,%s]" % (next(asked), one) for one in found.prompts])

    host.prompts = prompts  # type: ignore[method-assign]
    job = await submit(service, evaluation={"prompts": 3, "every": 1})
    await service.ends(job)
    found = await service.controller.queries.evaluations("alice", job)
    assert sorted((one.policy, one.version) for one in found) == [
        (policy, version) for policy in ("solver", "verifier") for version in range(3)
    ]
    assert len({tuple(str(result.prompt) for result in one.held_out) for one in found}) == 1


def knows(host: ScriptedHost, **constants: protocol.BestConstant) -> list[int]:
    """Has the host's environment know these constants; the list grows by the number of prompts of each call."""
    usual, asked = host.prompts, list[int]()

    def prompts(message: protocol.GetPrompts) -> protocol.Prompts:
        if not message.constant:
            return usual(message)
        asked.append(message.count)
        return protocol.Prompts(call="", constants=constants)

    host.prompts = prompts  # type: ignore[method-assign]
    return asked


def best(reply: str, reward: float) -> protocol.BestConstant:
    return protocol.BestConstant(reply=reply, reward=reward, prompts=3)


async def test_each_policy_is_compared_with_its_best_constant(service: Service) -> None:
    _, host = await service.join(script=debate)
    asked = knows(host, verifier=best("no", 0.25), **{"": best("3", 0.5)})
    job = await submit(service, evaluation={"prompts": 3, "every": 1})
    await service.ends(job)
    assert asked == [3], "once for all versions of all policies"
    views = await service.controller.queries.evaluations("alice", job)
    found = {(one.policy, one.constant.reply if one.constant else None) for one in views}
    assert found == {("solver", "3"), ("verifier", "no")} and len(views) == 6
    events = [event.text for event in await service.controller.queries.events("alice", job) if "constant" in event.text]
    assert len(events) == 6
    for text in events:
        assert text.endswith(f"earns {0.5 if text.startswith('solver') else 0.25:.3f}"), text


async def test_a_policy_whose_constant_is_unknown_shows_none(service: Service) -> None:
    _, host = await service.join(script=debate)
    knows(host, verifier=best("no", 0.25))
    job = await submit(service, evaluation={"prompts": 3})
    await service.ends(job)
    views = await service.controller.queries.evaluations("alice", job)
    assert {(one.policy, one.constant is None) for one in views} == {("solver", True), ("verifier", False)}


async def test_constants_of_the_first_evaluation_hold_after_a_crash(service: Service) -> None:
    """For every policy, though it is of one of them; the environment is not asked again."""

    def first_alone(message: protocol.Reset | protocol.StepEpisode) -> Any:
        return HANG if "-e1-" in message.episode or "-e2-" in message.episode else debate(message)

    _, host = await service.join(script=first_alone)
    knows(host, solver=best("3", 0.5), verifier=best("no", 0.25))
    job = await submit(service, evaluation={"prompts": 3, "every": 1}, environment__return_timeout=5)
    await eventually(lambda: bool(service.database.read(version_rows.evaluations, "alice", job)))
    await service.crash()
    await service.start()
    _, host = await service.join(script=debate, instance="host-2")
    asked = knows(host)
    await service.ends(job)
    views = await service.controller.queries.evaluations("alice", job)
    assert len(views) == 6 and asked == []
    assert {(one.policy, one.constant.reply if one.constant else None) for one in views} == {
        ("solver", "3"), ("verifier", "no"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("constants", "says"),
    [
        ({"critic": best("x", 1.0)}, "best_constant names the policy 'critic'; the job has solver, verifier"),
        ({"cri\ntic": best("x", 1.0)}, "best_constant names the policy 'cri\\ntic'; the job has solver, verifier"),
        ({"solver": best("x", float("nan"))}, "best_constant gives the reward nan, not a finite number"),
    ],
)
async def test_constants_that_a_host_may_not_give_pause_the_job(
    service: Service, constants: dict[str, protocol.BestConstant], says: str
) -> None:
    _, host = await service.join(script=debate)
    knows(host, **constants)
    job = await submit(service, evaluation={"prompts": 3})
    view = await service.ends(job, "paused")
    assert says in view.reason and view.reason.isprintable()
