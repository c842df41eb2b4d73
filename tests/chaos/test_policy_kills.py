"""A service that is killed between the commits of two policies of one job, again and again: what its database then
holds of each policy."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_service_kills import SHORT_DELAYS, patched, scripted_service
from tests.support.faces import job, write_model

from rookery.storage.artifacts import Artifacts

KILLS = 6
STEPS, GROUPS = 8, 2
PATIENCE = 200.0

POLICIES: dict[str, Any] = {
    "main": {"rank": 4, "targets": ["q"]},
    "judge": {"rank": 2, "targets": ["q"]},
    "opponent": {"train": False, "follows": {"policy": "main", "every": 3}},
    "held": {"rank": 4, "targets": ["q"], "train": False},
}


FATAL = """
import os, signal, sqlite3
from pathlib import Path
from rookery.storage.store import StorageWriter
transact, data, seen = StorageWriter._transact, Path(os.environ["ROOKERY_DATA"]), []
query = "select p.name, p.head_version from policies p join jobs j on j.id = p.job where j.name = 'several'"
def fatal(self, *calls):
    transact(self, *calls)
    if (data / "doom").exists():
        with sqlite3.connect(f"file:{data}/rookery.db?mode=ro", uri=True, timeout=60) as database:
            heads = dict(database.execute(query))
        now = heads.get("main"), heads.get("judge")
        if seen and now != seen[-1] and None not in now and now[0] != now[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(now)
StorageWriter._transact = fatal
"""
"""In the service, while a file ``doom`` is there: as soon as a commit leaves one policy ahead, it is killed."""


def rows(path: Path, query: str, *values: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(query, values)]


def heads(path: Path, id: str) -> dict[str, int]:
    found = rows(path, "select name, coalesce(head_version, -1) as head from policies where job = ?", id)
    return {row["name"]: row["head"] for row in found}


def one_is_ahead(path: Path, id: str, before: int) -> bool:
    """One of the two policies has committed a step that the other has not, or the job is over."""
    now = heads(path, id)
    [row] = rows(path, "select state from jobs where id = ?", id)
    ahead = now.get("main", -1) > max(before, 0) and now["main"] != now["judge"]
    return ahead or row["state"] == "completed"


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_kills_between_the_commits_of_two_policies_lose_and_repeat_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "cache")
    path, doom = tmp_path / "data" / "rookery.db", tmp_path / "data" / "doom"
    source = id = frozen = ""
    settings = patched(tmp_path, SHORT_DELAYS + FATAL)
    for kill in range(KILLS + 1):
        with scripted_service(tmp_path, **settings) as (service, client):
            if not source:
                begun = client.submit(job(name="source", stop={"steps": 1}))
                begun.wait(PATIENCE)
                source = begun.id
                held = {**POLICIES["held"], "warm_start": {"job": source}}
                spec = job(name="several", policies={**POLICIES, "held": held}, stop={"steps": STEPS})
                spec["environment"]["verifier"] = {"name": "judge", "policy": "judge", "scale": 4}
                spec["algorithm"] |= {"groups_per_step": GROUPS, "max_staleness": 1}
                doom.touch()
                id = client.submit(spec).id
            if kill < KILLS:
                assert service.process.wait(PATIENCE) == -signal.SIGKILL
                now = heads(path, id)
                assert now["main"] != now["judge"], "it came between two commits"
                if not frozen:
                    [version] = versions(path, id, "held")
                    frozen = version["hash"]
                if kill == KILLS - 1:
                    doom.unlink()
                continue
            client.job(id).wait(PATIENCE)
    check(path, id)
    [version] = versions(path, id, "held")
    assert version["hash"] == frozen
    Artifacts(tmp_path / "shared").verify(frozen)


def versions(path: Path, id: str, name: str) -> list[dict[str, Any]]:
    query = "select v.* from versions v join policies p on p.id = v.policy where p.job = ? and p.name = ? order by 1, 2"
    return sorted(rows(path, query, id, name), key=lambda row: row["version"])


def check(path: Path, id: str) -> None:
    """Each chain is gapless; each policy consumed its number of groups per version, each group once."""
    [row] = rows(path, "select state, reason, cursor from jobs where id = ?", id)
    assert (row["state"], row["reason"]) == ("completed", f"main: {STEPS} steps; judge: {STEPS} steps")
    groups = rows(path, "select * from groups where job = ? order by ordinal", id)
    assert [group["ordinal"] for group in groups] == list(range(row["cursor"]))
    ids = {one["name"]: one["id"] for one in rows(path, "select id, name from policies where job = ?", id)}
    assert ids.keys() == POLICIES.keys() - {"opponent"}, "a follower has no weights"
    for name in ("main", "judge"):
        numbers = [(one["version"], one["parent"], one["step"]) for one in versions(path, id, name)]
        assert numbers == [(n, n - 1 if n else None, n) for n in range(STEPS + 1)], name
        uses = [json.loads(group["uses"] or "{}").get(ids[name]) for group in groups]
        consumed = Counter(version for version in uses if version is not None and version >= 0)
        assert consumed == dict.fromkeys(range(1, STEPS + 1), GROUPS), name
    steps = rows(path, "select step, policy from steps where job = ? order by step", id)
    assert [one["step"] for one in steps] == list(range(1, 2 * STEPS + 1))
