"""Processes of environments of others: how many run, when they end, and that they start again where they are needed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.peers import PATIENCE, eventually, settle
from tests.support.processes import runs
from tests.support.waiting import until

from rookery.environments.foreign.pool import LibraryPool, LibraryProcesses
from rookery.environments.foreign.process import UNREAD, LibraryFailed, LibraryProcess
from rookery.errors import UserError
from rookery.turns import TENANT

ECHO = """
import json, os, subprocess, sys, time
given = json.loads(sys.argv[1])
while "gate" in given and not os.path.exists(given["gate"]):
    time.sleep(0.01)
if given.get("line"):
    print(given["line"], flush=True)
child = subprocess.Popen(["sleep", "300"]).pid if given.get("child") else 0
refused = {"refused": "env: no such game"}
print(json.dumps(refused if given.get("refuse") else {"ready": True, "child": child}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    print(json.dumps({"episode": message["say"], "pid": os.getpid()}), flush=True)
"""


class Echoes:
    """Environments whose process answers with its id, in one pool."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.script = folder / "echo.py"
        self.script.write_text(ECHO)
        self.pool = LibraryPool(**limits)

    def make(self, **given: Any) -> LibraryProcesses:
        """Returns when the process is ready, in a place without a tenant that it does not keep."""
        return LibraryProcesses("echo", sys.executable, self.script, given, self.pool)


async def pid_of(process: LibraryProcess) -> int:
    inbox = process.listen("one")
    process.send({"say": "one"})
    answer = await asyncio.wait_for(inbox.get(), PATIENCE)
    process.forget("one")
    return int(answer["pid"])


async def test_a_process_that_reads_nothing_delays_no_caller(echoes: Echoes) -> None:
    environment = echoes.make()
    process = await environment.join()
    pid = await pid_of(process)
    inboxes = [process.listen(f"{number}" * 10_000) for number in range(30)]  # a pipe holds 64 kB
    os.kill(pid, signal.SIGSTOP)
    going_on = threading.Timer(60, os.kill, (pid, signal.SIGCONT))
    going_on.start()
    for number in range(30):
        process.send({"say": f"{number}" * 10_000})
    assert going_on.is_alive(), "it read nothing meanwhile"
    with pytest.raises(LibraryFailed, match="echo: its process reads nothing"):
        process.send({"say": "x" * UNREAD})
    going_on.cancel()
    os.kill(pid, signal.SIGCONT)
    assert [(await asyncio.wait_for(inbox.get(), PATIENCE))["pid"] for inbox in inboxes] == [pid] * 30
    environment.leave(process)
    process.end()
    with pytest.raises(LibraryFailed, match="echo: its process has ended"):
        process.send({"say": "x"})


async def join_for(tenant: str, environment: LibraryProcesses) -> LibraryProcess:
    """To be run as a task."""
    TENANT.set(tenant)
    return await environment.join()


@pytest.fixture
def echoes(tmp_path: Path) -> Iterator[Echoes]:
    made = Echoes(tmp_path, most=2, idle_seconds=60.0, wait_seconds=20.0)
    yield made
    for process in list(made.pool.running()):
        process.end()


async def test_a_process_without_episodes_ends_and_starts_again_on_need(tmp_path: Path) -> None:
    echoes = Echoes(tmp_path, idle_seconds=0.05)
    environment = echoes.make()
    until(lambda: not echoes.pool.running())
    process = await environment.join()
    first = await pid_of(process)
    assert len(echoes.pool.running()) == 1
    environment.leave(await environment.join())  # another episode in it, which ends
    echoes.make(number=1)
    until(lambda: len(echoes.pool.running()) == 1)
    assert await pid_of(process) == first, "one with an episode does not end"
    environment.leave(process)
    until(lambda: not echoes.pool.running())
    process = await environment.join()
    assert await pid_of(process) != first
    environment.leave(process)


async def test_another_environment_ends_the_process_that_is_idle_longest(echoes: Echoes) -> None:
    made = [echoes.make(number=number) for number in range(3)]
    assert [one.process is not None and one.process.alive() for one in made] == [False, True, True]
    busy = await made[1].join()
    third = await made[0].join()  # takes the place of the third
    assert [one.process is not None and one.process.alive() for one in made] == [True, True, False]
    waiting = asyncio.create_task(made[2].join())
    await settle()
    assert not waiting.done() and echoes.pool.waiting() == 1 and len(echoes.pool.running()) == 2
    made[1].leave(busy)
    last = await asyncio.wait_for(waiting, PATIENCE)
    assert await pid_of(last) and not busy.alive()
    made[0].leave(third)
    made[2].leave(last)


async def test_a_wait_for_a_process_ends_with_a_line(tmp_path: Path) -> None:
    echoes = Echoes(tmp_path, most=1, wait_seconds=0.05)
    environment = echoes.make()
    process = await environment.join()
    with pytest.raises(UserError, match=r"environment\.id: 1 process of echo and others have episodes") as found:
        echoes.make(number=1)
    assert "\n" not in str(found.value)
    environment.leave(process)
    echoes.make(number=1)


async def test_a_cancelled_wait_keeps_no_process(echoes: Echoes, tmp_path: Path) -> None:
    (gate := tmp_path / "gate").touch()
    environment, other = echoes.make(gate=str(gate)), echoes.make(number=1)
    held = [await environment.join(), await other.join()]
    gate.unlink()
    third = asyncio.create_task(asyncio.to_thread(echoes.make, number=2))
    await eventually(lambda: echoes.pool.waiting() == 1)
    environment.leave(held[0])
    made = await third
    waiting = asyncio.create_task(environment.join())
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.touch()
    other.leave(held[1])
    until(lambda: all(not process.episodes for process in echoes.pool.running()))
    assert made.process is not None


async def test_one_that_was_killed_is_started_again_and_one_that_is_refused_counts_not(echoes: Echoes) -> None:
    environment = echoes.make()
    for _ in range(5):
        with pytest.raises(UserError, match=r"environment\.env: no such game"):
            echoes.make(refuse=True)
    process = await environment.join()
    first = await pid_of(process)
    process.kill()
    until(lambda: not process.alive())
    again = await environment.join()
    assert await pid_of(again) != first
    environment.leave(process)
    environment.leave(again)


async def test_episodes_that_begin_together_share_one_start(echoes: Echoes) -> None:
    environment, before = echoes.make(), threading.active_count()
    assert environment.process is not None
    environment.process.kill()
    until(lambda: not echoes.pool.running())
    joined = await asyncio.gather(*(environment.join() for _ in range(30)))
    assert len(set(map(id, joined))) == 1 and joined[0].episodes == 30
    for process in joined:
        environment.leave(process)
    assert threading.active_count() < before + 30, "no thread waits for each"


async def test_a_tenant_whose_episodes_overlap_gives_places_to_those_that_wait(tmp_path: Path) -> None:
    echoes = Echoes(tmp_path, most=4, wait_seconds=20.0)
    large = [echoes.make(number=number) for number in range(4)]
    small = [await asyncio.to_thread(echoes.make, number=number) for number in range(4, 7)]
    held = [await asyncio.create_task(join_for("large", one)) for one in large]
    waiting = [asyncio.create_task(join_for("small", one)) for one in small]
    await settle()
    overlapping = [asyncio.create_task(join_for("large", one)) for one in large]
    await settle()
    assert [task.done() for task in overlapping] == [False, False, True, True], "two drain, those held longest"
    assert not any(task.done() for task in waiting)
    for environment, process in zip(large, held, strict=True):
        environment.leave(process)
    got = await asyncio.wait_for(asyncio.gather(*waiting[:2]), PATIENCE)
    assert [process.tenant for process in got] == ["small", "small"]
    assert not waiting[2].done() and not overlapping[0].done(), "no tenant gets more than its half"
    small[0].leave(got[0])
    assert (await asyncio.wait_for(waiting[2], PATIENCE)).tenant == "small", "who has fewer places goes first"
    for environment, task in zip(large[2:], overlapping[2:], strict=True):
        environment.leave(task.result())
    for process in await asyncio.wait_for(asyncio.gather(*overlapping[:2]), PATIENCE):
        assert process.tenant == "large"
    for process in echoes.pool.running():
        process.end()


async def test_a_process_that_drains_continues_where_the_other_tenant_has_given_up(echoes: Echoes) -> None:
    environment, second, third = echoes.make(), echoes.make(number=1), echoes.make(number=2)
    first = await asyncio.create_task(join_for("a", environment))
    other = await asyncio.create_task(join_for("a", second))
    waiting = asyncio.create_task(join_for("b", third))
    await settle()
    assert [first.draining, other.draining] == [True, False]
    waiting.cancel()
    second.leave(other)
    other.end()
    assert await asyncio.wait_for(environment.join(), PATIENCE) is first
    environment.leave(first)
    environment.leave(first)


async def test_a_wait_holds_no_thread_and_a_running_process_is_joined_at_once(echoes: Echoes) -> None:
    environment, second, third = echoes.make(), echoes.make(number=1), echoes.make(number=2)
    held = [await environment.join(), await second.join()]
    before = threading.active_count()
    waiting = [asyncio.create_task(third.join()) for _ in range(200)]
    await settle()
    assert threading.active_count() < before + 20  # other tests' threads come and go in this process
    joining = environment.join()
    with pytest.raises(StopIteration) as joined:  # without a turn of the loop
        joining.send(None)
    assert joined.value.value is held[0]
    for task in waiting:
        task.cancel()
    assert all(
        isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*waiting, return_exceptions=True)
    )
    environment.leave(held[0])
    environment.leave(held[0])
    second.leave(held[1])
    assert len(echoes.pool.running()) == 2, "nothing is started for episodes that have ended"


async def test_a_slow_start_is_no_wait_for_a_place(tmp_path: Path) -> None:
    (gate := tmp_path / "gate").touch()
    echoes = Echoes(tmp_path, most=1, wait_seconds=0.05)
    environment = echoes.make(gate=str(gate))
    assert environment.process is not None
    environment.process.kill()
    until(lambda: not echoes.pool.running())
    gate.unlink()
    asyncio.get_running_loop().call_later(0.2, gate.touch)
    process = await environment.join()
    assert await pid_of(process)
    environment.leave(process)
    process.end()


def test_a_process_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    echoes = Echoes(tmp_path)
    with pytest.raises(
        UserError, match=r"environment\.id: the process of echo was not ready within 0\.1 s and was killed"
    ):
        LibraryProcess("echo", sys.executable, echoes.script, {"gate": str(tmp_path / "never")}, 0.1)


@pytest.mark.parametrize("line", ["loading", "[]", "[" * 100_000], ids=["text", "list", "depth"])
def test_a_process_that_begins_with_another_line_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=r"environment\.id: its process wrote a line that is no message as it started"):
        Echoes(tmp_path).make(line=line)


@pytest.mark.parametrize("ended_by", ["killed leader", "end", "kill"])
def test_children_of_a_process_end_with_it(tmp_path: Path, ended_by: str) -> None:
    process = LibraryProcess("echo", sys.executable, Echoes(tmp_path).script, {"child": True})
    child = process.ready["child"]
    match ended_by:
        case "killed leader":
            os.kill(os.getpgid(child), signal.SIGKILL)
        case "end":
            process.end()
        case "kill":
            process.kill()
    until(lambda: not runs(child))
