"""A job whose database goes away in any of its transactions: it resumes by itself, loses nothing, repeats nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.peers import Service, job_of
from tests.support.storing import FaultyDatabase

from rookery.errors import DatabaseAway
from rookery.storage.db import Database
from rookery.storage.repositories.jobs import get_job

STEPS = 3


class Losing(FaultyDatabase):
    """A database whose answer to one write is lost, ``taken`` or undone: the ``number``-th of the function ``name``."""

    def __init__(self, url: str, name: str = "", number: int = 0, *, taken: bool = False) -> None:
        super().__init__(url)
        self.calls: Counter[str] = Counter()
        self.lost, self._taken = (name, number), taken

    def write(self, function: Any, *arguments: Any, **named: Any) -> Any:
        name = function.__name__
        self.calls[name] += 1
        if (name, self.calls[name]) != self.lost:
            return super().write(function, *arguments, **named)
        if self._taken:
            super().write(function, *arguments, **named)
        raise DatabaseAway("the database does not answer")


async def end_of_job(folder: Path, *lost: Any, taken: bool = False) -> tuple[Counter[str], dict[str, Any]]:
    """The writes of a whole job, and what came of it."""
    service = Service(folder, suspect_seconds=1e9, stuck_seconds=1e9, request_timeout_seconds=1e9)
    service.database.close()
    database = service.database = Losing(f"sqlite:///{folder}/rookery.db", *lost, taken=taken)
    await service.start()
    try:
        await service.join()
        database.calls.clear()
        fields = job_of(stop__steps=STEPS, evaluation={"every": 1, "prompts": 2}, algorithm__max_staleness=1)
        for _ in range(2):
            try:
                view, _ = await service.controller.submit("alice", fields, "key")
                break
            except DatabaseAway:  # its client sends it again
                assert lost
        await service.pass_until(
            lambda: (
                Database.read(database, get_job, "alice", view.id).state in ("completed", "failed", "cancelled")
                and view.id not in service.controller.jobs.runners
            )
        )
        calls, database.lost = Counter(database.calls), ("", 0)
        row = database.read(get_job, "alice", view.id)
        versions = service.check_history(view.id)
        metrics = await service.controller.queries.metrics("alice", view.id)
        groups = service.groups(view.id)
        return calls, {
            "state": (row.state, row.reason),
            "steps": [one["step"] for one in metrics],
            "versions": [one.step for one in versions],
            "consumed": Counter(one["consumed_by"] for one in groups if one["state"] == "consumed"),
            "open": [one["state"] for one in groups if one["state"] not in ("consumed", "dropped", "failed")],
            "evaluations": [one.version for one in await service.controller.queries.evaluations("alice", view.id)],
            "unnamed": service.artifacts.hashes() - {one.hash for one in versions},
        }
    finally:
        await service.close()
        database.close()


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("taken", [False, True], ids=["undone", "durable"])
async def test_a_job_ends_alike_whichever_answer_of_the_database_is_lost(tmp_path: Path, taken: bool) -> None:
    usual, expected = await end_of_job(tmp_path / "usual")
    assert expected["state"][0] == "completed" and expected["steps"] == [1, 2, 3]
    wrong = {}
    for name, count in sorted(usual.items()):
        number = (count + 1) // 2
        try:
            _, found = await end_of_job(tmp_path / name, name, number, taken=taken)
        except (Exception, AssertionError) as error:
            wrong[name, number] = repr(error)
            continue
        if differing := {key: value for key, value in found.items() if value != expected[key]}:
            wrong[name, number] = repr(differing)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
