"""Child processes of the service: restarted when they end, unless that cannot help, and ended with the service; the
allocator of worker processes."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from tests.support import waiting
from tests.support.peers import PATIENCE, settle
from tests.support.processes import runs

from rookery.cluster import ray
from rookery.cluster.base import PRELOAD, environment_host, preloaded
from rookery.cluster.local import ProcessCluster, local_workers, ray_launchers
from rookery.cluster.supervisor import LOG_BYTES, NODE_LOST, Child, Supervisor, spawn_process
from rookery.errors import EXIT_REFUSED, Unavailable, UserError
from rookery.server.launcher import check_settings
from rookery.settings import Settings


def child(folder: Path, name: str, code: str) -> Child:
    """A child that runs ``code``."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return Child(name, [name], {**os.environ, "PYTHONPATH": str(folder)})


NO_PAUSES = (0.01, 0.01)

FAITHFUL = "import sys; print('up', flush=True); sys.stdin.read()"
STUBBORN = """
    import signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    sys.stdin.read()
"""


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(waiting.until, condition)


def content(path: Path) -> str:
    """Empty while there is no such file: a supervisor moves it away in between."""
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def up(folder: Path, name: str, times: int = 1) -> bool:
    return content(folder / "logs" / f"{name}.log").count("up") >= times


def running(*children: Child) -> bool:
    """A child may write before its start is recorded; until then its pid is 0, which names this process group."""
    return all(one.state == "running" and one.pid for one in children)


async def test_killed_child_is_restarted_and_stop_ends_it(tmp_path: Path) -> None:
    processes = Supervisor([child(tmp_path, "faithful", FAITHFUL)], tmp_path / "logs", stop_seconds=30)
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


async def test_child_whose_log_folder_was_deleted_is_restarted(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    processes = Supervisor([child(tmp_path, "faithful", FAITHFUL)], logs, stop_seconds=30)
    await processes.start()
    one = processes.children[0]
    await until(lambda: up(tmp_path, "faithful") and running(one))
    shutil.rmtree(logs)
    os.kill(one.pid, signal.SIGKILL)
    await until(lambda: logs.is_dir() and up(tmp_path, "faithful") and running(one))
    await processes.stop()
    assert one.state == "stopped"


async def test_large_log_is_rotated_and_one_old_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "faithful.log"
    for life in range(3):
        processes = Supervisor([child(tmp_path, "faithful", FAITHFUL)], tmp_path / "logs", stop_seconds=30)
        await processes.start()
        await until(lambda: content(path) == "up\n")
        await processes.stop()
        with path.open("a") as file:
            file.write(f"life {life} " + "x" * LOG_BYTES)
    old = path.with_name("faithful.log.1").read_text()
    assert old.count("life") == old.count("life 1 ") == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["faithful.log", "faithful.log.1"]


async def test_large_log_of_a_running_child_is_shortened(tmp_path: Path) -> None:
    """A library of an environment that writes for weeks would fill the disk."""
    later = "signal.signal(signal.SIGTERM, lambda *_: (print('later', flush=True), sys.exit(0)))"
    up, written = "print('up', *range(1000), flush=True)", tmp_path / "written"
    code = f"import signal, sys; {later}; {up}; open({str(written)!r}, 'w').close(); sys.stdin.read()"
    path, text = tmp_path / "logs" / "talkative.log", " ".join(["up", *map(str, range(1000))]) + "\n"
    old = path.with_name("talkative.log.1")
    processes = Supervisor([child(tmp_path, "talkative", code)], path.parent, 30, log_limit=(1000, 0.05))
    await processes.start()
    # a look may come in the middle of the text: then its rest is in the present log, or lost
    await until(lambda: written.exists() and len(content(old)) >= 1000 and path.stat().st_size <= 1000)
    assert content(old) in text and running(*processes.children)
    await processes.stop()
    rest = path.read_text()
    assert rest.endswith("later\n") and "\0" not in rest and len(rest) <= 1000 + len("later\n")


class EndedProcess:
    """It has ended, and nobody has waited for it yet."""

    pid = 1

    def __init__(self) -> None:
        self.signals = 0
        self._sent = asyncio.Event()

    async def wait(self) -> int:
        await self._sent.wait()
        return 1

    def terminate(self) -> None:
        self.signals += 1
        self._sent.set()
        raise ProcessLookupError

    kill = terminate


async def test_stop_and_removal_of_children_that_have_just_ended(tmp_path: Path) -> None:
    processes = {name: EndedProcess() for name in ("one", "two")}

    async def spawn(child: Child, log: Path) -> EndedProcess:
        return processes[child.name]

    children = [Child(name, [], {}) for name in processes]
    kept = Supervisor(children, tmp_path, stop_seconds=5, spawn=spawn)
    await kept.start()
    await until(lambda: all(one.state == "running" for one in children))
    kept.remove(children[:1])
    await kept.stop()
    assert all(process.signals for process in processes.values())


async def test_stop_kills_a_child_that_ignores_sigterm_or_is_stopped(tmp_path: Path) -> None:
    children = [child(tmp_path, "stubborn", STUBBORN), child(tmp_path, "halted", FAITHFUL)]
    processes = Supervisor(children, tmp_path / "logs", stop_seconds=0.5)
    await processes.start()
    await until(lambda: up(tmp_path, "stubborn") and up(tmp_path, "halted") and running(*children))
    pids = [one.pid for one in children]
    os.kill(pids[1], signal.SIGSTOP)
    await processes.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_stop_right_after_start_leaves_no_process(tmp_path: Path) -> None:
    before = {*psutil.Process().children()}  # such as those that other tests of this program share
    processes = Supervisor([child(tmp_path, "faithful", FAITHFUL)], tmp_path / "logs", stop_seconds=30)
    await processes.start()
    await settle(1)
    await processes.stop()
    assert processes.children[0].state == "stopped"
    assert {*psutil.Process().children()} <= before


async def test_child_that_refuses_to_start_is_not_restarted_and_its_last_line_is_reported(tmp_path: Path) -> None:
    code = f"import sys; print('no such model'); print(); sys.exit({EXIT_REFUSED})"
    processes = Supervisor([child(tmp_path, "hopeless", code)], tmp_path / "logs", stop_seconds=5)
    await processes.start()
    await until(lambda: processes.children[0].state == "refused")
    assert processes.children[0].reason == f"ended with code {EXIT_REFUSED}: no such model"
    assert processes.children[0].restarts == 0
    await processes.stop()


async def test_a_child_that_always_ends_in_the_same_way_is_reported(tmp_path: Path) -> None:
    """Whatever numbers are in its last line; a child that is killed from outside is not."""
    same = """
        import os
        print(f"2026-01-01 10:00:00,000 ERROR rookery.worker: no kernel at {os.getpid()}", flush=True)
        raise SystemExit(1)
    """
    changing = f"""
        from pathlib import Path
        lives = Path({str(tmp_path)!r}) / "lives"
        print("x" * (1 + lives.stat().st_size if lives.exists() else 1))
        with lives.open("a") as file:
            file.write("x")
        raise SystemExit(1)
    """
    killed = "import os; os.kill(os.getpid(), 9)"
    reports: list[tuple[str, str]] = []
    processes = Supervisor(
        [child(tmp_path, name, code) for name, code in (("same", same), ("changing", changing), ("killed", killed))],
        tmp_path / "logs",
        5,
        failed=lambda one, reason: reports.append((one.name, reason)),
        pauses=NO_PAUSES,
    )
    await processes.start()
    await until(lambda: all(one.restarts > 4 for one in processes.children))
    await processes.stop()
    assert {name for name, _ in reports} == {"same"} and len(reports) >= 2
    assert re.fullmatch(r"3 times in a row it ended with code 1: no kernel at \d+", reports[0][1])


async def test_a_worker_that_refuses_is_reported_by_its_model_and_started_again_when_needed(tmp_path: Path) -> None:
    settings = Settings.load({}, data=tmp_path / "data", cache=tmp_path / "cache", models="", workers=1)
    failures: list[tuple[str, ...]] = []
    cluster = ProcessCluster(settings, "no://address", "token", lambda *about: failures.append(about))
    await cluster.start()
    for times in (1, 2):
        cluster.provide("qwen3-0.6b")
        await until(lambda: len(failures) == times)  # noqa: B023 (it is awaited here)
        cluster.provide("qwen3-0.6b")
    await cluster.stop()
    assert failures[0][::2] == ("qwen3-0.6b", "local-qwen3-0.6b-1") and "--connect" in failures[0][1]


LOST = AsyncMock(return_value=Mock(pid=1, wait=AsyncMock(return_value=NODE_LOST)))
"""Starts a process on a machine that is lost at once."""


@pytest.mark.parametrize(("spawn", "pauses"), [(spawn_process, "0.5, 1.0, 2.0"), (LOST, "0.5, 0.5, 0.5")])
async def test_pause_before_a_restart_grows_unless_the_machine_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spawn: Any, pauses: str
) -> None:
    processes = Supervisor([child(tmp_path, "short", "raise SystemExit(1)")], tmp_path / "logs", 5, spawn)
    await processes.start()
    await until(lambda: processes.children[0].restarts >= 3)
    await processes.stop()
    assert ", ".join(re.findall(r"restarting it in (\S+) s", caplog.text)[:3]) == pauses


@pytest.mark.parametrize("fails", ["started", "watched"])
async def test_a_child_is_kept_after_any_error_of_its_start(tmp_path: Path, fails: str) -> None:
    """Ray refuses a placement with a ValueError; asyncio's child watcher fails with a RuntimeError without threads."""
    broken = Mock(pid=1, wait=AsyncMock(side_effect=RuntimeError("can't start new thread")))
    tries = [ValueError("no such bundle") if fails == "started" else broken, Ended(None)]

    async def spawn(child: Child, log: Path) -> Any:
        if isinstance(found := tries.pop(0), Exception):
            raise found
        return found

    kept = Supervisor([Child("one", [], {})], tmp_path / "logs", 5, spawn)
    await kept.start()
    await until(lambda: running(*kept.children) and not tries)
    assert kept.children[0].reason.startswith(f"could not be {fails}: ")
    assert broken.kill.called == (fails == "watched"), "a second one would run beside it"
    await kept.stop()


async def test_a_host_that_refused_is_reported_and_started_again(tmp_path: Path) -> None:
    reasons, codes = list[str](), [EXIT_REFUSED, EXIT_REFUSED, None]
    cluster = ProcessCluster(
        Settings(data=tmp_path), "http://127.0.0.1:1", "token", host_failed=reasons.append, host_retry_seconds=0.01
    )

    async def spawn(child: Child, log: Path) -> Ended:
        return Ended(codes.pop(0))

    host = environment_host(Settings(data=tmp_path), "http://127.0.0.1:1", "token")
    cluster.processes._spawn = spawn
    cluster.processes.add([host])
    await cluster.processes.start()
    await until(lambda: running(host))
    assert reasons == ["it wrote nothing"] * 2 and not codes
    await cluster.stop()


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    child(tmp_path, "faithful", FAITHFUL)
    parent = f"""
        import asyncio, os
        from pathlib import Path
        from rookery.cluster.local import ProcessCluster
        from rookery.cluster.supervisor import Child, Supervisor

        async def main():
            environment = {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}}
            children = [Child(f"faithful{{i}}", ["faithful"], environment) for i in range(2)]
            processes = Supervisor(children, Path({str(tmp_path)!r}) / "logs", 5)
            await processes.start()
            while not all(child.pid for child in children):
                await asyncio.sleep(0.01)
            print(*[child.pid for child in children], flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    waiting.until(lambda: not any(map(runs, pids)), "children outlive their parent")


def test_local_workers_follow_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_KEY", "tml-secret")
    settings = Settings.load(
        {},
        data=tmp_path,
        workers=2,
        key="tml-secret",
        memory_bytes=1 << 31,
    )
    models = ["smollm2-135m-instruct", f"{tmp_path}/my model"]
    workers = local_workers(settings, models, "http://127.0.0.1:1", "the-token")
    assert [one.name for one in workers] == [
        "worker-smollm2-135m-instruct-1",
        "worker-smollm2-135m-instruct-2",
        "worker-my-model-1",
        "worker-my-model-2",
    ]
    for one in [*workers, environment_host(settings, "http://127.0.0.1:1", "the-token")]:
        assert "the-token" not in " ".join(one.arguments)
        assert one.environment["ROOKERY_TOKEN"] == "the-token"
        assert "ROOKERY_KEY" not in one.environment
        assert one.environment["ROOKERY_MEMORY_BYTES"] == str(1 << 31)
        assert "--die-with-parent" in one.arguments
    assert all(int(one.environment["ROOKERY_THREADS"]) >= 1 for one in workers)
    shares = [float(one.environment["ROOKERY_MEMORY_SHARE"]) for one in workers]
    assert sum(shares) == pytest.approx(settings.worker.memory_share)
    inherited = Settings.load(workers[0].environment)
    assert (inherited.cache, inherited.data, inherited.server.workers) == (settings.cache, settings.data, 2)


def without(name: str) -> dict[str, str]:
    return {other: value for other, value in os.environ.items() if other != name}


def test_openmp_spin_count_is_set_before_torch_is_loaded() -> None:
    """The OpenMP runtime reads it when torch loads it; a value set by the user is kept."""
    code = "import os, sys, rookery.worker; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = without("GOMP_SPINCOUNT")
    for given, told in ({}, "10000 False\n"), ({"GOMP_SPINCOUNT": "7"}, "7 False\n"):
        done = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
        assert done.stdout == told


def test_mkl_reproducibility_is_set_on_intel_processors() -> None:
    """MKL reads it at its first product; a value set by the user is kept."""
    code = "import os, sys, rookery.worker; print(os.environ.get('MKL_CBWR'), 'torch' in sys.modules)"
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    for given, told in ({}, "AUTO,STRICT" if intel else None), ({"MKL_CBWR": "AVX2"}, "AVX2"):
        environment = without("MKL_CBWR") | given
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout == f"{told} False\n"


HERE = find_library(Settings().worker.allocator)


@pytest.mark.skipif(HERE is None, reason=f"this machine has no {Settings().worker.allocator}")
def test_process_runs_with_the_allocator_of_the_settings() -> None:
    maps = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    environment = preloaded({"PATH": "/usr/bin"}, Settings().worker.allocator)
    found = subprocess.run(maps, env=environment, capture_output=True, text=True, check=True)
    assert str(HERE) in found.stdout and not found.stderr
    assert str(HERE) not in subprocess.run(maps, env={}, capture_output=True, text=True, check=True).stdout


def test_library_that_is_already_preloaded_is_kept() -> None:
    assert preloaded({PRELOAD: "libother.so"}, "c") == {PRELOAD: f"{find_library('c')} libother.so"}
    chosen = {PRELOAD: "/opt/libjemalloc.so.2", "A": "b"}
    assert preloaded(chosen, "c") == chosen


def test_missing_library_or_empty_name_keeps_the_c_library_allocator() -> None:
    assert preloaded({"A": "b"}, "no_such_allocator") == {"A": "b"}
    assert preloaded({"A": "b"}, "") == {"A": "b"}


def test_workers_of_a_service_get_the_allocator_and_environments_do_not() -> None:
    settings = Settings.load()
    (worker,) = local_workers(settings, ["smollm2-135m-instruct"], "http://127.0.0.1:1", "token")
    host = environment_host(settings, "http://127.0.0.1:1", "token")
    assert worker.environment.get(PRELOAD) == preloaded(host.environment, settings.worker.allocator).get(PRELOAD)
    assert host.environment.get(PRELOAD) == os.environ.get(PRELOAD)


@pytest.mark.parametrize("code", [FAITHFUL, STUBBORN], ids=["faithful", "stubborn"])
async def test_a_removed_child_ends_without_restart_and_the_others_continue(tmp_path: Path, code: str) -> None:
    kept, gone = child(tmp_path, "kept", FAITHFUL), child(tmp_path, "gone", code)
    processes = Supervisor([kept, gone], tmp_path / "logs", stop_seconds=0.5)
    await processes.start()
    await until(lambda: up(tmp_path, "kept") and up(tmp_path, "gone") and running(kept, gone))
    pid = gone.pid
    processes.remove([gone])
    await until(lambda: gone.state == "stopped")
    assert not runs(pid) and running(kept) and processes.children == [kept]
    again = child(tmp_path, "gone", FAITHFUL)
    processes.add([again])
    await until(lambda: running(again) and up(tmp_path, "gone", 2))
    await processes.stop()


async def test_a_removed_child_has_the_time_of_a_drain(tmp_path: Path) -> None:
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("drained", flush=True), sys.exit(0)))
        print("up", flush=True)
        sys.stdin.read()
    """
    drains = child(tmp_path, "drains", code)
    processes = Supervisor([drains], tmp_path / "logs", stop_seconds=0.1, remove_seconds=30)
    await processes.start()
    await until(lambda: up(tmp_path, "drains") and running(drains))
    processes.remove([drains])
    await until(lambda: drains.state == "stopped")
    assert "drained" in content(tmp_path / "logs" / "drains.log")
    await processes.stop()


async def test_workers_of_a_model_that_was_released_end_and_configured_ones_stay(tmp_path: Path) -> None:
    cluster = ProcessCluster(Settings(data=tmp_path, models="one"), "http://127.0.0.1:1", "token")
    cluster.provide("two")
    cluster.provide("two")
    cluster.release("one")
    cluster.release("two")
    cluster.provide("two")
    names = [one.name for one in cluster.processes.children]
    assert names == ["worker-two-1"]


# --- a number of rollout workers that changes -------------------------------------------------------------------------


def elastic_cluster(folder: Path, **settings: Any) -> ProcessCluster:
    given = {"models": "m", "workers": 1, "scale_max": 4, "data": folder, "cache": folder} | settings
    return ProcessCluster(Settings.load({}, **given), "http://127.0.0.1:1", "token")


def test_rollout_workers_are_started_and_the_last_ones_ended_first(tmp_path: Path) -> None:
    cluster = elastic_cluster(tmp_path)
    names = lambda: [child.name for child in cluster.processes.children]  # noqa: E731
    cluster.scale("m", 3, [])
    assert names() == ["worker-m-rollout-1", "worker-m-rollout-2"]
    assert all("--roles rollout" in " ".join(child.arguments) for child in cluster.processes.children)
    cluster.scale("m", 3, [])
    assert len(names()) == 2
    cluster.scale("m", 2, [])
    assert names() == ["worker-m-rollout-1"]
    cluster.scale("m", 0, [])
    assert names() == [], "the configured worker is not among these and stays"
    cluster.scale("unknown", 3, [])
    assert names() == [], "nothing serves this model"


def test_workers_that_others_started_count(tmp_path: Path) -> None:
    """Else each window of steps would start as many again."""
    cluster, serving = elastic_cluster(tmp_path, scale_max=8), ["local-m-1", "by-hand"]
    cluster.scale("m", 2, serving)
    assert cluster.processes.children == []
    cluster.scale("m", 3, serving)
    assert [child.name for child in cluster.processes.children] == ["worker-m-rollout-1"]
    cluster.scale("m", 3, [*serving, "local-m-rollout-1"])
    assert len(cluster.processes.children) == 1
    cluster.scale("m", 4, ["local-m-1", "local-m-rollout-1", "gpu-rollout-1"])
    assert len(cluster.processes.children) == 2, "a name alone does not make a worker one of the pool"


def test_workers_share_the_memory_when_there_are_as_many_as_are_allowed(tmp_path: Path) -> None:
    given = {"scale_max": 4, "models": "m,n", "memory_share": 0.8}
    cluster = elastic_cluster(tmp_path, **given)
    cluster.scale("m", 4, [])
    settings = Settings.load({}, workers=1, data=tmp_path, cache=tmp_path, **given)
    started = [*local_workers(settings, ["m", "n"], "u", "t"), *cluster.processes.children]
    assert {child.environment["ROOKERY_MEMORY_SHARE"] for child in started} == {"0.1"}


@pytest.mark.parametrize(
    ("workers", "least", "more"), [(1, 3, 2), (2, 3, 1), (3, 3, 0), (0, 1, 1), (0, 0, 0), (1, 0, 0)]
)
async def test_fewest_rollout_workers_are_there_before_any_job_asks(
    tmp_path: Path, workers: int, least: int, more: int
) -> None:
    cluster = elastic_cluster(tmp_path, workers=workers, scale_min=least)

    async def spawn(child: Child, log: Path) -> Ended:
        return Ended(None)

    cluster.processes._spawn = spawn

    def of_model(name: str) -> list[str]:
        named = (child.name for child in cluster.processes.children)
        return [one.removeprefix(f"worker-{name}-") for one in named if one.startswith(f"worker-{name}-")]

    numbers = [str(number + 1) for number in range(workers)]
    await cluster.start()
    assert of_model("m") == [*numbers, *(f"rollout-{number + 1}" for number in range(more))]
    cluster.provide("m")
    cluster.provide("n")
    assert len(of_model("m")) == workers + more
    assert len(of_model("n")) == (workers + more if workers else 0), "no worker is started for other models"
    cluster.release("n")
    assert of_model("n") == []
    cluster.scale("m", least, [])
    assert len(of_model("m")) == workers + more, "no job of the model runs any more"
    await cluster.stop()


async def test_refused_rollout_workers_are_started_again_when_a_job_needs_them(tmp_path: Path) -> None:
    cluster, codes = elastic_cluster(tmp_path, workers=0, scale_min=2), [EXIT_REFUSED, EXIT_REFUSED, None, None]

    async def spawn(child: Child, log: Path) -> Ended:
        return Ended(codes.pop(0) if child.model else None)

    cluster.processes._spawn = spawn
    await cluster.start()
    rollout = [child for child in cluster.processes.children if child.model]
    await until(lambda: [child.state for child in rollout] == ["refused"] * 2)
    cluster.provide("m")
    await until(lambda: running(*rollout))
    assert codes == []
    await cluster.stop()


async def test_fewest_workers_on_ray_are_written_for_a_model_that_a_job_names(tmp_path: Path) -> None:
    cluster = elastic_cluster(tmp_path, cluster="ray", models="", scale_min=4, ray_spot_workers=1)
    cluster.provide("a/m")
    assert [child.name for child in cluster.processes.children] == ["ray-m"]
    await until(lambda: ray.read_scale(tmp_path, "a/m") == 2)


def test_number_for_ray_is_read_also_where_no_other_worker_is_configured(tmp_path: Path) -> None:
    settings = Settings.load({}, cluster="ray", workers=0, scale_max=4, data=tmp_path, cache=tmp_path)
    assert [child.name for child in ray_launchers(settings, ["m"], "u", "t")] == ["ray-m"]
    cluster = elastic_cluster(tmp_path, cluster="ray", workers=0)
    cluster.provide("named")
    assert cluster.processes.children == [], "no worker is started for other models"


async def test_number_for_ray_is_left_where_its_process_reads_it(tmp_path: Path) -> None:
    cluster = elastic_cluster(tmp_path, cluster="ray", models="a/m,b/m")
    for count in (4, 2, 3):
        cluster.scale("a/m", count, [])
    await until(lambda: ray.read_scale(tmp_path, "a/m") == 2)
    assert ray.read_scale(tmp_path, "b/m") == 0, "the same last name is another model"
    ray.clear_scale(tmp_path)
    assert ray.read_scale(tmp_path, "a/m") == 0


async def test_ray_is_asked_at_once_for_nodes_of_a_larger_pool(tmp_path: Path) -> None:
    wanted = [2]
    settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_spot_workers=1, ray_gpus=0)
    make = lambda number: Child(f"rollout-{number}", [], {})  # noqa: E731
    spot = [Child("spot-1", [], {})]
    actors = ray.RayActors(settings, [], spot, [], lambda nodes: None, make, lambda: wanted[0])
    actors.resize()
    assert [child.name for child in actors.supervisor.children] == ["spot-1", "rollout-1", "rollout-2"]
    bundles, labels = actors.bundles(spot=True)
    assert (bundles, labels) == ([{"CPU": 1.0}] * 3, [{"pool": "spot"}] * 3)
    wanted[0] = 1
    actors.resize()
    assert [child.name for child in actors.supervisor.children] == ["spot-1", "rollout-1"]


class Ended:
    """A process that has ended with this code, or has not ended yet."""

    pid = 1

    def __init__(self, code: int | None) -> None:
        self._code = asyncio.get_running_loop().create_future()
        if code is not None:
            self.end(code)

    async def wait(self) -> int:
        return int(await self._code)

    def end(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    def terminate(self) -> None:
        self.end(0)

    kill = terminate


class StubbedRay:
    """The calls of Ray that :class:`~rookery.cluster.ray.RayActors` makes outside of its actors."""

    def __init__(self) -> None:
        self.found = [{"NodeID": "head", "NodeManagerAddress": "1.1.1.1", "Alive": True, "Labels": {}, "Resources": {}}]
        self.draining: Callable[[], set[str]] = set
        self.looks = 0
        groups = Mock(placement_group=Mock(return_value=None))
        here = Mock(nodes=self.nodes, get_runtime_context=lambda: Mock(get_job_id=lambda: "job"))
        here._private.state.state.get_draining_nodes = lambda: self.draining()
        stored = Mock(internal_kv=Mock(_internal_kv_list=lambda prefix: []))
        self.modules = {
            "ray": here, "ray.util": Mock(), "ray.util.placement_group": groups,
            "ray.util.scheduling_strategies": Mock(),
            "ray.autoscaler": Mock(), "ray.autoscaler.sdk": Mock(), "ray.experimental": stored,
        }  # fmt: skip

    def nodes(self) -> list[dict[str, Any]]:
        self.looks += 1
        return self.found


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubbedRay:
    """In place of Ray."""
    stub = StubbedRay()
    for name, module in stub.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return stub


async def test_a_worker_that_refuses_on_its_node_ends_no_other_one(tmp_path: Path, stub: StubbedRay) -> None:
    refusing, started = {"spot-1"}, list[tuple[str, Ended]]()
    settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_gpus=0)
    reserved, spot = [Child(f"reserved-{i}", [], {}) for i in (1, 2)], [Child(f"spot-{i}", [], {}) for i in (1, 2)]
    actors = ray.RayActors(settings, reserved, spot, [], lambda nodes: None, look_seconds=0.01)

    async def spawn(child: Child, log: Path) -> Ended:
        started.append((child.name, Ended(EXIT_REFUSED if child.name in refusing else None)))
        return started[-1][1]

    actors.supervisor = Supervisor([*reserved, *spot], tmp_path / "logs", 5, spawn)
    ended = asyncio.create_task(actors.run())
    await until(lambda: spot[0].state == "refused" and running(*reserved, spot[1]) and stub.looks > 0)
    refusing.clear()
    stub.found = [*stub.found, stub.found[0] | {"NodeID": "larger"}]
    await until(lambda: running(*spot))
    assert sorted(name for name, _ in started) == ["reserved-1", "reserved-2", "spot-1", "spot-1", "spot-2"]
    assert not ended.done()
    for name, process in started:
        if name.startswith("reserved"):
            process.end(EXIT_REFUSED)
    assert "code 2" in await asyncio.wait_for(ended, PATIENCE), "no trainer is left"


@pytest.mark.usefixtures("stub")
async def test_workers_on_ray_that_crash_in_a_loop_end_their_launcher_with_the_reason(tmp_path: Path) -> None:
    """As long as one of those that are needed works, it stays."""
    settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_gpus=0)
    reserved, good = [Child(f"reserved-{i}", [], {}) for i in (1, 2)], list[Ended]()
    actors = ray.RayActors(settings, reserved, [], [], lambda nodes: None, look_seconds=0.01)

    async def spawn(child: Child, log: Path) -> Ended:
        works = child is reserved[1] and not good
        good.extend([Ended(None)] * works)
        return good[0] if works else Ended(1)

    actors.supervisor = Supervisor(reserved, tmp_path / "logs", 5, spawn, pauses=NO_PAUSES)
    ended = asyncio.create_task(actors.run())
    await until(lambda: reserved[0].restarts > 3)
    assert reserved[0].failure and not ended.done()
    good[0].end(1)
    assert await asyncio.wait_for(ended, PATIENCE) == "3 times in a row it ended with code 1: it wrote nothing"


async def test_gpus_of_workers_on_ray_are_those_of_nodes_that_were_ever_seen(tmp_path: Path, stub: StubbedRay) -> None:
    """Without a node a worker waits; without a reservation several would share a GPU."""
    settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_spot_workers=1)
    children = [Child("reserved", [], {})], [Child("spot", [], {})]
    actors = ray.RayActors(settings, *children, [], lambda nodes: None)
    both = lambda: [actors.bundles(spot=spot)[0] for spot in (False, True)]  # noqa: E731
    with_gpu = stub.found[0] | {"NodeID": "gpu", "Resources": {"GPU": 4.0}}
    actors.look(stub.found)
    assert both() == [[{"CPU": 1.0}], [{"CPU": 1.0}]]
    actors.look([*stub.found, with_gpu])
    assert both() == [[{"CPU": 1.0, "GPU": 1.0}], [{"CPU": 1.0}]]
    actors.look([with_gpu | {"Labels": {"pool": "spot"}}])
    actors.look([*stub.found, with_gpu | {"Alive": False}])
    assert both() == [[{"CPU": 1.0, "GPU": 1.0}]] * 2
    assert actors.options(children[0][0])["num_gpus"] == 0.0, "as its group has, until a larger one has its nodes"
    assert actors.options(children[1][0])["num_gpus"] == 1.0


@pytest.mark.parametrize(
    ("placed", "free", "in_the_way"),
    [
        (["gpu"], {"gpu": {"CPU": 1.0, "GPU": 1.0}}, True),
        (["gpu"], {"gpu": {"CPU": 3.0, "GPU": 1.0}}, False),
        (["gpu"], {"gpu": {"CPU": 1.0, "GPU": 0.0}}, False),
        (["gpu"], {"gpu": {"CPU": 1.0, "GPU": 1.0}, "next": {"CPU": 3.0, "GPU": 1.0}}, False),
        (["cpu"], {"cpu": {"CPU": 1.0}, "gpu": {"CPU": 1.0, "GPU": 1.0}}, False),
        (["cpu"], {"cpu": {"CPU": 1.0}, "gpu": {"CPU": 3.0, "GPU": 1.0}}, False),
        (["gpu", "cpu"], {"cpu": {"CPU": 1.0}, "gpu": {"CPU": 1.0, "GPU": 2.0}}, False),
        (["gpu", "cpu"], {"cpu": {"CPU": 1.0}, "gpu": {"CPU": 3.0, "GPU": 2.0}}, True),
        (["gpu", "gone"], {"gpu": {"CPU": 3.0, "GPU": 2.0}}, True),
        (["gpu"], {"cpu": {"CPU": 3.0}}, False),
    ],
)
def test_placement_group_is_removed_early_only_where_the_next_has_no_room(
    placed: list[str], free: dict[str, dict[str, float]], in_the_way: bool
) -> None:
    assert ray.is_in_the_way(placed, {"CPU": 3.0}, {"CPU": 3.0, "GPU": 1.0}, free) == in_the_way


async def test_workers_on_ray_outlive_a_short_absence_of_the_head(tmp_path: Path, stub: StubbedRay) -> None:
    looks = list[int]()

    def answered_every_second_time() -> set[str]:
        looks.append(1)
        if len(looks) % 2:
            raise ConnectionError("GCS is away")
        return set()

    stub.draining = answered_every_second_time
    settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_gpus=0)
    worker = Child("reserved", [], {})
    actors = ray.RayActors(settings, [worker], [], [], lambda nodes: None, look_seconds=0.01)

    async def spawn(child: Child, log: Path) -> Ended:
        return Ended(None)

    actors.supervisor = Supervisor([worker], tmp_path / "logs", 5, spawn)
    ended = asyncio.create_task(actors.run())
    await until(lambda: len(looks) > 6 and running(worker))
    assert not ended.done()
    actors.stopped.set()
    assert await ended == ""


def test_no_answer_of_a_head_is_no_refusal() -> None:
    """A restart of the process that asks can help; the start of a service refuses it in one line."""
    pytest.importorskip("ray")
    with pytest.raises(Unavailable, match=r"ray_address 127\.0\.0\.1:1: no Ray cluster answers"):
        ray.connect("127.0.0.1:1")


async def test_refused_workers_of_the_pool_are_started_again_when_it_is_counted(tmp_path: Path) -> None:
    cluster, started = elastic_cluster(tmp_path), list[str]()

    async def spawn(child: Child, log: Path) -> Ended:
        started.append(child.name)
        return Ended(EXIT_REFUSED if len(started) < 3 else None)

    cluster.processes = Supervisor([], tmp_path / "logs", 5, spawn)
    await cluster.processes.start()
    for times in (1, 2, 3):
        cluster.scale("m", 2, ["local-m-1"])
        await until(lambda: len(started) == times)  # noqa: B023 (it is awaited here)
        await until(lambda: cluster.processes.children[0].state == ("refused" if times < 3 else "running"))  # noqa: B023
    assert [child.name for child in cluster.processes.children] == ["worker-m-rollout-1"]
    await cluster.stop()


async def test_ended_keepers_of_refused_children_are_dropped(tmp_path: Path) -> None:
    """A host of environments that refuses is started again every half a minute, however long the service runs."""
    refusing, keepers = Child("one", [], {}), list[weakref.ref[asyncio.Task[None]]]()

    async def spawn(child: Child, log: Path) -> Ended:
        if (keeper := asyncio.current_task()) is not None:
            keepers.append(weakref.ref(keeper))
        return Ended(EXIT_REFUSED)

    kept = Supervisor([refusing], tmp_path / "logs", 5, spawn)
    await kept.start()
    for times in (1, 2, 3, 4):
        await until(lambda: refusing.state == "refused" and len(keepers) == times)  # noqa: B023 (it is awaited here)
        kept.retry([refusing])
    await until(lambda: len(keepers) == 5)
    gc.collect()
    assert sum(keeper() is not None for keeper in keepers) <= 2
    await kept.stop()


async def test_refused_workers_of_a_configured_model_are_started_again_when_a_job_needs_them(tmp_path: Path) -> None:
    settings, codes = Settings(data=tmp_path, models="one"), [EXIT_REFUSED, None]
    cluster = ProcessCluster(settings, "http://127.0.0.1:1", "token")

    async def spawn(child: Child, log: Path) -> Ended:
        return Ended(codes.pop(0))

    [worker] = local_workers(settings, ["one"], "http://127.0.0.1:1", "token")
    cluster.processes = Supervisor([worker], tmp_path / "logs", 5, spawn)
    await cluster.processes.start()
    await until(lambda: worker.state == "refused")
    cluster.provide("one")
    await until(lambda: running(worker))
    cluster.provide("one")
    assert codes == [] and cluster.processes.children == [worker]
    await cluster.stop()


def test_bounds_of_the_pool_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^ROOKERY_SCALE_MAX is 2, less than ROOKERY_SCALE_MIN, 3; set it to 0 or at"):
        check_settings(Settings.load({}, data=tmp_path, cache=tmp_path, scale_min=3, scale_max=2))
    for least in (0, 2):
        with pytest.raises(UserError, match=f"ROOKERY_SCALE_MIN is {least}, but .* ROOKERY_SCALE_MAX alone; set that"):
            check_settings(Settings.load({}, data=tmp_path, cache=tmp_path, scale_min=least))
        check_settings(Settings.load({}, data=tmp_path, cache=tmp_path, scale_min=least, scale_max=2))
    for workers, most in ((4, 4), (4, 0), (0, 2)):
        check_settings(Settings.load({}, data=tmp_path, cache=tmp_path, workers=workers, scale_max=most))
    with pytest.raises(UserError, match="ROOKERY_SCALE_MAX is 2, but the 4 workers"):
        check_settings(Settings.load({}, data=tmp_path, cache=tmp_path, workers=4, scale_max=2))
