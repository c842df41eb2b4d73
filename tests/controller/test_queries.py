"""Looking at jobs costs the same however long their history is, and wakes nobody else."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import IO, Any

import pytest
from tests.support.peers import MODEL, Service, eventually, job_of, settle

from rookery.storage.rows import NewPolicy
from rookery.telemetry.metrics import BLOCK, FILE, MetricsLog

ROW = {"step": 0, "reward": 0.0, "padding": "x" * 900}
"""As long as a real one."""


class Read:
    """Counts what is read of metrics files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        opened = Path.open

        def counting(path: Path, *arguments: Any, **named: Any) -> IO[Any]:
            file = opened(path, *arguments, **named)
            if path.name == FILE:
                read = file.read

                def counted(*arguments: Any) -> Any:
                    content = read(*arguments)
                    self.bytes += len(content)
                    return content

                return _Wrapped(file, counted)  # type: ignore[return-value]
            return file

        monkeypatch.setattr(Path, "open", counting)

    def taken(self) -> int:
        taken, self.bytes = self.bytes, 0
        return taken


class _Wrapped:
    def __init__(self, file: IO[Any], read: Any) -> None:
        self._file, self.read = file, read

    def __enter__(self) -> _Wrapped:
        return self

    def __exit__(self, *told: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def ended_job(service: Service, id: str, steps: int) -> None:
    """A job that was completed by an earlier process, after so many steps."""
    policy = NewPolicy(id=f"{id}-policy", name="main", rank=8, alpha=16.0, targets=["q"])
    service.database.submit_job(
        id=id, tenant="alice", name=id, spec={"base_model": MODEL, "stop": {"steps": steps}}, created=1.0,
        policies=[policy],
    )  # fmt: skip
    service.database.set_job_state(id, "completed", "", 2.0)
    path = service.folder / "jobs" / id / FILE
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({**ROW, "step": step, "reward": float(step)}, separators=(",", ":")) + "\n")


async def test_a_list_reads_the_end_of_each_jobs_history(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Read(monkeypatch)
    taken = []
    for number, steps in enumerate((100, 10_000)):
        ended_job(service, f"job-{number}", steps)
        view = await service.controller.queries.show("alice", f"job-{number}")
        assert view.rewards == [float(step) for step in range(steps - 63, steps + 1)] and view.reward == steps
        taken.append(read.taken())
    assert taken[0] == taken[1] <= 2 * BLOCK
    calls = Counter[str]()
    writer = service.writer

    async def counted(call: Any, *arguments: Any, **named: Any) -> Any:
        calls[call.__name__] += 1
        return await writer(call, *arguments, **named)

    service.controller.context.store._writer = counted
    assert len(await service.controller.queries.list("alice")) == 2
    assert read.taken() == sum(taken)
    assert set(calls.values()) == {1}, "no query for each job"


async def test_rows_later_than_a_step_are_read_from_the_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Read(monkeypatch)
    ended_job(service, "job", 10_000)
    rows = await service.controller.queries.metrics("alice", "job", after=9_998)
    assert [row["step"] for row in rows] == [9_999, 10_000]
    assert read.taken() <= BLOCK
    assert len(await service.controller.queries.metrics("alice", "job")) == 10_000


def test_lines_of_any_length_come_back_from_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.telemetry.metrics.BLOCK", 7)
    kept = MetricsLog(tmp_path)
    for step in range(1, 30):
        kept.append({"step": step, "text": "é" * (step % 11)})
    assert [row["step"] for row in kept.read()] == list(range(1, 30))
    for count in (0, 1, 5, 29, 99):
        assert [row["step"] for row in kept.newest(count)] == list(range(1, 30))[-count:] * bool(count)
    with kept.path.open("ab") as file:
        file.write(b'{"step": 30, "torn')
    assert [row["step"] for row in kept.newest(2)] == [28, 29]
    assert [row["step"] for row in kept.read(after=27)] == [28, 29]


async def test_a_follower_is_woken_by_its_own_job_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    for name in ("quiet", "loud"):
        view, _ = await service.controller.submit("alice", job_of(name=name, environment={"hosted": "nobody"}))
        jobs.append(view.id)
    looks = Counter[str]()
    show = service.controller.queries.show

    async def counted(tenant: str, job: str) -> Any:
        looks[job] += 1
        return await show(tenant, job)

    monkeypatch.setattr(service.controller.queries, "show", counted)
    states = [await show("alice", job) for job in jobs]
    while any(view.state != "running" for view in states):
        states = [await show("alice", job) for job in jobs]
    waiting = [asyncio.ensure_future(service.controller.queries.wait("alice", job)) for job in jobs]
    await eventually(lambda: looks == Counter(dict.fromkeys(jobs, 1)))
    for _ in range(3):
        await service.controller.pause("alice", jobs[1])
        await service.controller.resume("alice", jobs[1])
        await settle()
    await eventually(lambda: looks[jobs[1]] >= 4)
    assert looks[jobs[0]] == 1
    for job, task in zip(jobs, waiting, strict=True):
        await service.controller.cancel("alice", job)
        assert (await task).state == "cancelled"
    assert service.controller.jobs.followed() == 0, "nobody follows them any more"
