"""Local children: kept alive, left alone when that cannot help, gone when the service is."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.support.processes import runs

from rookery.cluster.local import Child, LocalHost, LocalProcesses, LocalWorkers
from rookery.errors import EXIT_REFUSED
from rookery.settings import Settings


def child(folder: Path, name: str, code: str) -> Child:
    """A child that runs ``code``."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return Child(name, [name], {**os.environ, "PYTHONPATH": str(folder)})


FAITHFUL = "import sys; print('up', flush=True); sys.stdin.read()"
STUBBORN = """
    import signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    sys.stdin.read()
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in another process)
            await asyncio.sleep(0.02)


def up(folder: Path, name: str, times: int = 1) -> bool:
    path = folder / "logs" / f"{name}.log"
    return path.exists() and path.read_text().count("up") >= times


def running(*children: Child) -> bool:
    """A child may speak before its start is noted; until then it has no number, and 0 is this process and its kin."""
    return all(one.state == "running" and one.pid for one in children)


async def test_a_killed_child_is_started_again_and_stop_ends_all(tmp_path: Path) -> None:
    processes = LocalProcesses([child(tmp_path, "faithful", FAITHFUL)], tmp_path / "logs", stop_seconds=30)
    await processes.start()
    one = processes.children[0]
    await until(lambda: up(tmp_path, "faithful") and running(one))
    first = one.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: up(tmp_path, "faithful", 2) and running(one))
    assert one.pid != first
    assert one.restarts == 1
    assert one.reason.startswith("ended with signal 9")
    second = one.pid
    await processes.stop()
    assert one.state == "stopped"
    assert not psutil.pid_exists(second)


async def test_a_child_whose_log_was_taken_away_is_started_again(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    processes = LocalProcesses([child(tmp_path, "faithful", FAITHFUL)], logs, stop_seconds=30)
    await processes.start()
    one = processes.children[0]
    await until(lambda: up(tmp_path, "faithful") and running(one))
    shutil.rmtree(logs)
    os.kill(one.pid, signal.SIGKILL)
    await until(lambda: "could not be started" in one.reason)
    logs.mkdir()
    await until(lambda: up(tmp_path, "faithful") and running(one))
    await processes.stop()
    assert one.state == "stopped"


async def test_a_large_log_makes_room_for_a_new_one_and_one_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.cluster.local.LOG_BYTES", 1000)
    path = tmp_path / "logs" / "faithful.log"
    for life in range(3):
        processes = LocalProcesses([child(tmp_path, "faithful", FAITHFUL)], tmp_path / "logs", stop_seconds=30)
        await processes.start()
        await until(lambda: path.exists() and path.read_text() == "up\n")
        await processes.stop()
        with path.open("a") as file:
            file.write(f"life {life} " + "x" * 1000)
    old = path.with_name("faithful.log.1").read_text()
    assert "life 1" in old and "life 0" not in old
    assert sorted(p.name for p in path.parent.iterdir()) == ["faithful.log", "faithful.log.1"]


async def test_stop_kills_what_ignores_it_or_is_stopped(tmp_path: Path) -> None:
    children = [child(tmp_path, "stubborn", STUBBORN), child(tmp_path, "halted", FAITHFUL)]
    processes = LocalProcesses(children, tmp_path / "logs", stop_seconds=0.5)
    await processes.start()
    await until(lambda: up(tmp_path, "stubborn") and up(tmp_path, "halted") and running(*children))
    pids = [one.pid for one in children]
    os.kill(pids[1], signal.SIGSTOP)
    await processes.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_stop_right_after_start_leaves_nothing(tmp_path: Path) -> None:
    processes = LocalProcesses([child(tmp_path, "faithful", FAITHFUL)], tmp_path / "logs", stop_seconds=30)
    await processes.start()
    await asyncio.sleep(0)
    await processes.stop()
    assert processes.children[0].state == "stopped"
    assert not psutil.Process().children()


async def test_a_child_that_cannot_work_is_left_alone_with_its_last_words(tmp_path: Path) -> None:
    code = f"import sys; print('no such model'); print(); sys.exit({EXIT_REFUSED})"
    processes = LocalProcesses([child(tmp_path, "hopeless", code)], tmp_path / "logs", stop_seconds=5)
    await processes.start()
    await until(lambda: processes.children[0].state == "refused")
    assert processes.children[0].reason == f"ended with code {EXIT_REFUSED}: no such model"
    assert processes.children[0].restarts == 0
    await processes.stop()


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    child(tmp_path, "faithful", FAITHFUL)
    parent = f"""
        import asyncio, os
        from pathlib import Path
        from rookery.cluster.local import Child, LocalProcesses

        async def main():
            environment = {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}}
            children = [Child(f"faithful{{i}}", ["faithful"], environment) for i in range(2)]
            processes = LocalProcesses(children, Path({str(tmp_path)!r}) / "logs", 5)
            await processes.start()
            while not all(child.pid for child in children):
                await asyncio.sleep(0.01)
            print(*[child.pid for child in children], flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "children outlive their parent"
        time.sleep(0.02)


def test_workers_are_what_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_KEY", "tml-secret")
    settings = Settings.load(
        {},
        data=tmp_path,
        models=f"smollm2-135m-instruct, {tmp_path}/my model",
        workers=2,
        key="tml-secret",
        kv_bytes=1 << 24,
    )
    workers = LocalWorkers(settings, "http://127.0.0.1:1", "the-token").children
    assert [one.name for one in workers] == [
        "worker-smollm2-135m-instruct-1",
        "worker-smollm2-135m-instruct-2",
        "worker-my-model-1",
        "worker-my-model-2",
    ]
    for one in [*workers, *LocalHost(settings, "http://127.0.0.1:1", "the-token").children]:
        assert "the-token" not in " ".join(one.arguments)
        assert one.environment["ROOKERY_TOKEN"] == "the-token"
        assert "ROOKERY_KEY" not in one.environment
        assert one.environment["ROOKERY_KV_BYTES"] == str(1 << 24)
        assert "--die-with-parent" in one.arguments
    assert all(int(one.environment["ROOKERY_THREADS"]) >= 1 for one in workers)
    inherited = Settings.load(workers[0].environment)
    assert (inherited.cache, inherited.data, inherited.server.workers) == (settings.cache, settings.data, 2)


def without(name: str) -> dict[str, str]:
    return {other: value for other, value in os.environ.items() if other != name}


def test_how_threads_wait_is_set_before_torch_is_there() -> None:
    """The OpenMP runtime reads it when torch loads it; what the user set stays."""
    code = "import os, sys, rookery.worker; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = without("GOMP_SPINCOUNT")
    for given, told in ({}, "10000 False\n"), ({"GOMP_SPINCOUNT": "7"}, "7 False\n"):
        done = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
        assert done.stdout == told


def test_products_are_reproducible_on_intels_processors() -> None:
    """MKL reads it at its first product; what the user set stays."""
    code = "import os, sys, rookery.worker; print(os.environ.get('MKL_CBWR'), 'torch' in sys.modules)"
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    for given, told in ({}, "AUTO,STRICT" if intel else None), ({"MKL_CBWR": "AVX2"}, "AVX2"):
        environment = without("MKL_CBWR") | given
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout == f"{told} False\n"
