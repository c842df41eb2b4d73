"""The database agrees with a small model whatever is called, in any order, right or wrong, with restarts in between."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import select
from tests.support.draws import examples
from tests.support.storing import check_counted_bytes, commit, connected, group_counts, new_group, submit

from rookery.errors import Conflict
from rookery.storage import models
from rookery.storage.db import Database
from rookery.storage.repositories import jobs, tenants
from rookery.storage.repositories import versions as version_rows


class AnyOrder(RuleBasedStateMachine):
    """The database against a model in a few dictionaries, through any order of calls, right and wrong, and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.url = f"sqlite:///{self.folder.name}/rookery.db"
        self.database = Database(self.url)
        self.database.create()
        self.database.write(tenants.create_tenant, "alice", "", 0.0)
        submit(self.database)
        self.states: dict[int, str] = {}
        self.consumed: dict[str, int] = {}
        self.parents: list[int | None] = []
        self.head: int | None = None
        self.lease = 0

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    @rule(first=st.integers(0, 2), count=st.integers(1, 3))
    def add(self, first: int, count: int) -> None:
        start = len(self.states) + (first - 1 if first != 1 else 0)
        groups = [new_group(start + n) for n in range(count)] if start >= 0 else []
        if not groups or start != len(self.states):
            if groups:
                with pytest.raises(Conflict):
                    self.database.write(jobs.add_groups, "job", groups)
            return
        self.database.write(jobs.add_groups, "job", groups)
        self.states |= {group.ordinal: "open" for group in groups}

    @precondition(lambda self: self.states)
    @rule(data=st.data(), state=st.sampled_from(["ready", "failed", "dropped"]))
    def finish(self, data: st.DataObject, state: Any) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.states)))
        group = new_group(ordinal)
        for episode in group.episodes:
            closed = self.database.write(jobs.finish_episode, episode.id, 1.0, trajectories=b"x")
            assert closed == (self.states[ordinal] == "open")
        if self.states[ordinal] != "open":
            with pytest.raises(Conflict):
                self.database.write(jobs.finish_group, group.id, state, 2.0)
            return
        self.database.write(jobs.finish_group, group.id, state, 2.0, min_version=self.head)
        self.states[ordinal] = state

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ordinals = data.draw(st.lists(st.sampled_from(sorted(self.states)), unique=True, max_size=3))
        dropped = [n for n in ordinals if self.states[n] in ("open", "ready")]
        asked = [new_group(n).id for n in ordinals]
        assert self.database.write(jobs.drop_groups, asked, "", 3.0) == [new_group(n).id for n in dropped]
        self.states |= dict.fromkeys(dropped, "dropped")

    @rule()
    def take_over(self) -> None:
        self.lease += 1
        assert self.database.write(jobs.next_lease, "job-main") == self.lease

    @rule(data=st.data(), lease=st.sampled_from([0, 0, 0, -1, 1]), back=st.sampled_from([0, 0, 0, 1]))
    def commit(self, data: st.DataObject, lease: int, back: int) -> None:
        ready = [n for n, state in self.states.items() if state == "ready"]
        ordinals = data.draw(st.lists(st.sampled_from(sorted(self.states)), max_size=2)) if self.states else []
        ordinals += data.draw(st.sampled_from([ready, []]))
        groups = [new_group(n).id for n in ordinals]
        parent = self.head if not back else (self.head or 0) - 1
        fits = (
            lease == 0 and parent == self.head and len(set(ordinals)) == len(ordinals) and set(ordinals) <= set(ready)
        )
        if not fits:
            with pytest.raises(Conflict):
                commit(self.database, self.lease + lease, parent, groups, len(self.parents))
            return
        version = commit(self.database, self.lease, parent, groups, len(self.parents))
        assert version == len(self.parents)
        self.parents.append(parent)
        self.head = version
        self.states |= dict.fromkeys(ordinals, "consumed")
        self.consumed |= dict.fromkeys(groups, version)

    @precondition(lambda self: self.head is not None)
    @rule()
    def roll_back(self) -> None:
        assert self.head is not None
        parent = self.parents[self.head]
        if parent is None:
            with pytest.raises(Conflict):
                self.database.write(version_rows.rollback, "job-main", self.head, "corrupt")
            return
        assert self.database.write(version_rows.rollback, "job-main", self.head, "corrupt").version == parent
        self.head = parent

    @rule()
    def restart(self) -> None:
        self.database.close()
        self.database = Database(self.url)
        self.database.create()

    @invariant()
    def agrees(self) -> None:
        assert self.database.read(jobs.get_job, "alice", "job").cursor == len(self.states)
        for state in ("open", "ready"):
            rows = (
                self.database.read(jobs.open_groups, "job")
                if state == "open"
                else self.database.read(jobs.ready_groups, "job")
            )
            assert [row.ordinal for row in rows] == [n for n in sorted(self.states) if self.states[n] == state]
        counts = {state: list(self.states.values()).count(state) for state in set(self.states.values())}
        assert group_counts(self.database, "job") == counts
        versions = self.database.read(version_rows.versions, "alice", "job-main")
        assert [version.parent for version in versions] == self.parents
        policy = self.database.read(jobs.get_policy, "alice", "job", "main")
        assert (policy.head_version, policy.lease) == (self.head, self.lease)
        with connected(self.url) as connection:
            found = connection.execute(select(models.GroupRow.id, models.GroupRow.consumed_by)).all()
        assert {row.id: row.consumed_by for row in found if row.consumed_by is not None} == self.consumed
        check_counted_bytes(self.url)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(12), stateful_step_count=20)
