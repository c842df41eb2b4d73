"""The event about steps whose rewards teach nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.peers import Service, eventually, job_of, user_message

from rookery import protocol
from rookery.storage.repositories import versions


async def signals(service: Service, job: str) -> list[str]:
    events = await service.controller.queries.events("alice", job)
    return [event.text for event in events if event.kind == "no_signal"]


def rewards(of_step: dict[int, float]) -> Any:
    """A script whose rewards in the groups of a step (two groups each, on-policy) are equal where the step is named."""

    def script(message: Any) -> Any:
        if not isinstance(message, protocol.StepEpisode):
            return None
        group, member = message.episode.split("-g")[1].split("-")
        equal = of_step.get(int(group) // 2 + 1)
        return {"reward": float(member) if equal is None else equal, "done": True}

    return script


@pytest.mark.parametrize(
    ("flat", "steps", "expected"),
    [
        ({1: 0.0, 2: 0.0}, 5, []),
        ({1: 0.0, 2: 0.0, 4: 0.0, 5: 0.0}, 5, []),
        (dict.fromkeys(range(1, 8), 0.0), 7, ["steps 1 to 3: ", "mean reward 0)", "sampling.max_tokens: 8"]),
        ({2: 0.5, 3: 1.0, 4: 1.0}, 5, ["steps 2 to 4: ", "mean reward 0.5 to 1)"]),
    ],
)
async def test_three_steps_in_a_row_without_variance_are_one_event(
    service: Service, flat: dict[int, float], steps: int, expected: list[str]
) -> None:
    await service.join(script=rewards(flat))
    view, _ = await service.controller.submit("alice", job_of(stop__steps=steps))
    await service.ends(view.id)
    found = await signals(service, view.id)
    assert len(found) == bool(expected)
    for part in [*expected, *(["(1)", "(2)", "(3)"] if expected else [])]:
        assert part in found[0]


async def test_the_event_and_the_alarm_say_the_same(service: Service) -> None:
    await service.join(script=rewards({1: 0.0, 2: 0.5, 3: 0.0}))
    view, _ = await service.controller.submit("alice", job_of(stop__steps=3))
    await service.ends(view.id)
    (alarm,) = (await service.controller.queries.job_health("alice", view.id)).alarms
    assert await signals(service, view.id) == [f"{alarm.problem}, so {alarm.remedy}"]


async def test_of_several_policies_the_event_names_the_one_and_its_steps(service: Service) -> None:
    """The second policy's rewards are equal in every group, those of the first differ."""

    def script(message: Any) -> Any:
        if not isinstance(message, protocol.StepEpisode):
            return None
        if message.turn == 0:
            return {"messages": [user_message("Now b.")], "policy": "b"}
        return {"rewards": {"a": float(message.episode.rpartition("-")[2])}, "done": True}

    await service.join(script=script)
    view, _ = await service.controller.submit("alice", job_of(policies={"a": {}, "b": {}}, stop__steps=3))
    await service.ends(view.id)
    assert [text.partition(": all rewards")[0] for text in await signals(service, view.id)] == ["b: steps 1 to 3"]


async def test_a_second_time_is_a_second_event(service: Service) -> None:
    await service.join(script=rewards({1: 0, 2: 0, 3: 0, 5: 0, 6: 0, 7: 0, 8: 0}))
    view, _ = await service.controller.submit("alice", job_of(stop__steps=8))
    await service.ends(view.id)
    assert [text.partition(":")[0] for text in await signals(service, view.id)] == ["steps 1 to 3", "steps 5 to 7"]


async def test_steps_before_a_restart_count(service: Service) -> None:
    await service.join(script=rewards(dict.fromkeys(range(1, 9), 0.0)))
    view, _ = await service.controller.submit("alice", job_of(stop__steps=8))
    for steps in (2, 4):
        await eventually(lambda steps=steps: len(service.database.read(versions.steps, "alice", view.id)) >= steps)
        await service.crash()
        await service.start()
        await service.join(script=rewards(dict.fromkeys(range(1, 9), 0.0)))
    await service.ends(view.id)
    assert [text.partition(":")[0] for text in await signals(service, view.id)] == ["steps 1 to 3"]
