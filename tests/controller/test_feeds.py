"""Followers of a job share one task that reads the database."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support.peers import settle

from rookery.aio import Signal
from rookery.controller.feeds import PAGE, ROWS_KEPT, FeedJob, FeedRow, JobFeeds
from rookery.controller.views import CostView, JobView
from rookery.errors import NotFound


class Stored:
    """A job in a database that counts its reads."""

    def __init__(self, steps: int) -> None:
        self.signal, self.state, self.steps = Signal(), "running", steps
        self.shows = self.pages = 0
        self.encodings: list[Callable[..., Any]] = []
        self.feeds = JobFeeds(self.show, self.page, self.last_step, lambda job: self.signal, self.encode)

    async def show(self, tenant: str, job: str) -> JobView:
        if tenant != "alice":
            raise NotFound("no job")
        self.shows += 1
        await settle(1)
        cost = CostView(cost=0, reserved=0, preemptible=0, seconds=0, tokens_per_unit=None)
        return JobView.model_construct(id=job, state=self.state, reason="", cost=cost)

    async def page(self, tenant: str, job: str, after: int, limit: int) -> list[dict[str, Any]]:
        self.pages += 1
        await settle(1)
        return [{"step": step} for step in range(after + 1, self.steps)][:limit]

    async def last_step(self, tenant: str, job: str) -> int:
        return self.steps - 1

    async def encode(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.encodings.append(call)
        await settle(1)
        return call(*arguments)

    def commit(self, steps: int = 1) -> None:
        self.steps += steps
        self.signal.notify()

    def end(self) -> None:
        self.state = "completed"
        self.signal.notify()


async def collected(events: AsyncIterator[Any], pause: float = 0.0) -> list[Any]:
    found = []
    async for kind, data in events:
        found.append(data.step if isinstance(data, FeedRow) else kind)
        await asyncio.sleep(pause)
    return found


async def test_two_hundred_followers_cost_the_reads_of_one() -> None:
    stored = Stored(3)
    followers = [asyncio.create_task(collected(stored.feeds.follow("alice", "j", after=2))) for _ in range(200)]
    await settle()
    for _ in range(10):
        stored.commit()
        await settle()
    stored.end()
    for found in await asyncio.gather(*followers):
        assert found == ["job", *range(3, 13), "job", "end"]
    assert stored.shows <= 13 and stored.pages <= 26


async def test_a_change_is_encoded_once_and_kept_as_a_text() -> None:
    stored = Stored(1)
    events = [stored.feeds.follow("alice", "j") for _ in range(3)]
    [changed, *others] = [data for _, data in [await anext(one) for one in events]]
    assert isinstance(changed, FeedJob) and all(other is changed for other in others)
    assert stored.encodings == [FeedJob], "in a thread: a spec may have megabytes"
    view = await stored.show("alice", "j")
    assert json.loads(changed.encoded) == json.loads(view.model_dump_json())
    assert not [held for held in gc.get_referents(changed, changed.__dict__) if isinstance(held, JobView)]
    for one in events:
        await one.aclose()


async def test_followers_that_begin_early_or_read_slowly_miss_nothing() -> None:
    stored = Stored(2 * PAGE + 7)
    late = asyncio.create_task(collected(stored.feeds.follow("alice", "j")))
    slow = asyncio.create_task(collected(stored.feeds.follow("alice", "j", after=2 * PAGE), pause=0.0001))
    for _ in range(6):
        await settle()
        stored.commit(ROWS_KEPT // 2 + 1)
    await settle()
    stored.end()
    steps = stored.steps
    assert [one for one in await late if isinstance(one, int)] == list(range(steps))
    assert [one for one in await slow if isinstance(one, int)] == list(range(2 * PAGE + 1, steps))


async def test_an_ended_job_is_followed_to_its_end_and_read_again_for_the_next_one() -> None:
    stored = Stored(2)
    stored.end()
    for _ in range(2):
        assert await collected(stored.feeds.follow("alice", "j")) == ["job", 0, 1, "end"]
    assert stored.shows == 2


async def test_another_tenants_job_is_unknown() -> None:
    stored = Stored(2)
    with pytest.raises(NotFound):
        await collected(stored.feeds.follow("bob", "j"))


async def test_a_quiet_job_differs_from_a_dead_connection() -> None:
    stored = Stored(0)
    events = stored.feeds.follow("alice", "j", quiet_seconds=0.01)
    assert [(await anext(events))[0] for _ in range(3)] == ["job", "quiet", "quiet"]
    await events.aclose()
    assert len(asyncio.all_tasks()) == 1, "nobody follows: the task has ended"


class StoredSteps(Stored):
    """A job whose steps have rows, which a rollback deletes."""

    def __init__(self, steps: int) -> None:
        super().__init__(0)
        self.rows: list[dict[str, Any]] = []
        self.take(steps)

    async def page(self, tenant: str, job: str, after: int, limit: int) -> list[dict[str, Any]]:
        await settle(1)
        return [row for row in self.rows if row["step"] > after][:limit]

    async def last_step(self, tenant: str, job: str) -> int:
        return self.rows[-1]["step"] if self.rows else -1

    def take(self, count: int) -> None:
        for _ in range(count):
            self.steps += 1
            step = self.rows[-1]["step"] + 1 if self.rows else 1
            self.rows.append({"step": step, "version": self.steps, "time": float(self.steps)})
        self.signal.notify()

    def roll_back(self, step: int) -> None:
        self.rows = [row for row in self.rows if row["step"] <= step]
        self.signal.notify()


class Reader:
    """A follower, and the rows that it has."""

    def __init__(self, stored: StoredSteps, after: int = -1, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows, self.kinds = rows or [], list[str]()
        time = self.rows[-1]["time"] if self.rows else None
        self.task = asyncio.create_task(self._follow(stored.feeds.follow("alice", "j", after, time=time)))

    async def _follow(self, events: AsyncIterator[Any]) -> None:
        async for kind, data in events:
            self.kinds.append(kind)
            if kind == "rollback":
                self.rows = [row for row in self.rows if row["step"] <= data]
            if kind == "metrics":
                assert not self.rows or self.rows[-1]["step"] < data.step
                self.rows.append(data.metrics)


@pytest.mark.parametrize("steps", [10, ROWS_KEPT + 10])
@pytest.mark.parametrize("back", [4, 9, ROWS_KEPT + 8])
@pytest.mark.parametrize("again", [0, 3, 6, 2 * ROWS_KEPT])
@pytest.mark.parametrize("noticed", [True, False])
async def test_every_follower_has_the_rows_that_are_stored_after_a_rollback(
    steps: int, back: int, again: int, noticed: bool
) -> None:
    back = min(back, steps)
    stored = StoredSteps(steps)
    there, late, waits = Reader(stored), Reader(stored, steps), Reader(stored, 2**31)
    await settle()
    left = there.rows[:]
    stored.roll_back(back)
    if noticed:
        await settle()
    new = Reader(stored)
    stored.take(again)
    resumed = Reader(stored, steps, left)
    await settle()
    stored.take(2)
    stored.end()
    await asyncio.gather(*(one.task for one in (there, late, waits, new, resumed)))
    for one in (there, new, resumed):
        assert one.rows == stored.rows
    assert late.rows == stored.rows[back if steps - back < ROWS_KEPT else 0 :]
    assert waits.rows == [] and waits.kinds == ["job", "job", "end"]


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("last", [9, 10])
async def test_deleted_rows_between_those_of_another_policy_are_replaced(last: int, noticed: bool) -> None:
    stored = StoredSteps(last)
    there, late = Reader(stored), Reader(stored, last)
    await settle()
    left = there.rows[:]
    stored.steps += 1
    renewed = float(stored.steps)
    kept = [row for row in stored.rows if row["step"] not in (5, 7, 9)]
    stored.rows = [{**row, "renewed": renewed} if row["step"] > 5 else row for row in kept]
    stored.signal.notify()
    if noticed:
        await settle()
    new, resumed = Reader(stored), Reader(stored, last, left)
    stored.take(2)
    await settle()
    again = Reader(stored, stored.rows[-1]["step"], stored.rows[:])
    stored.end()
    await asyncio.gather(*(one.task for one in (there, late, new, resumed, again)))
    for one in (there, new, resumed):
        assert one.rows == stored.rows
    assert late.rows == stored.rows[4:] and {*again.kinds} == {"job", "end"}


async def test_a_follower_that_has_the_last_row_resumes_after_it() -> None:
    stored = StoredSteps(7)
    reader = Reader(stored, 5, stored.rows[:5])
    stored.end()
    await reader.task
    assert reader.kinds == ["job", "metrics", "metrics", "end"] and reader.rows == stored.rows
