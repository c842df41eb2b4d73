"""A small world of real processes that die at any moment: a service with its children, joined workers, and hosts of
environments of one's own. ``python chaos.py URL`` is such a host.

What happened is read from the database file, which answers also while everything else is dead.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from tests.support.ports import free_port
from tests.support.processes import alive
from tests.support.waiting import until

from rookery.client import Client, Job
from rookery.environments.base import Environment, Reply, Split, Step
from rookery.environments.host import Host
from rookery.settings import TOKEN_VARIABLE, Settings

PATIENCE_SECONDS = 240.0
"""A test that waits longer for something fails: far more than a loaded machine needs to start a few processes."""

SETTINGS = {
    "heartbeat_seconds": "0.5",
    "suspect_seconds": "5",  # a worker whose link is up and that says nothing: only one that is stopped
    "threads": "1",  # also what makes the trainer's sums the same in every run
    "models": "",
    "resume_seconds": "60",  # a service on a loaded machine may take that long to have its jobs again
    "failure_rate_window": "400",  # a kill fails most of what is in flight, and a job that most of fails would pause
    "stop_seconds": "30",
    "drain_seconds": "20",
}

CHILDREN = {"worker": "rookery.worker.process", "environments": "rookery.environments.host"}
"""The modules that the service's own children run."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], what: str) -> T:
    """The result of ``condition`` as soon as it is true."""
    return until(condition, f"never came to pass: {what}", patience=PATIENCE_SECONDS)


# --- environments -----------------------------------------------------------------------------------------------------


class Steady(Environment):
    """Three turns whose questions and rewards are a function of prompt, seed and replies."""

    deterministic = True
    turns = 3

    def prompts(self, split: Split) -> Iterable[Any]:
        return [{"number": number} for number in range(11)]

    def reset(self, prompt: Any, seed: int) -> Any:
        self.said = [f"{prompt['number']} {seed}"]
        return [{"role": "user", "content": f"Begin with {prompt['number']}."}]

    def step(self, reply: Reply) -> Step:
        self.said.append(" ".join(map(str, reply.tokens)))
        done = reply.turn + 1 == self.turns
        asked = {"role": "user", "content": f"More, {self._draw() % 100}."}
        return Step(messages=[] if done else [asked], reward=self._draw() % 1000 / 1000, done=done)

    def _draw(self) -> int:
        return int.from_bytes(hashlib.sha256("\n".join(self.said).encode()).digest()[:4], "big")


class Fickle(Steady):
    """An environment that promises nothing: every life of it asks something else."""

    deterministic = False

    def step(self, reply: Reply) -> Step:
        self.said.append(str(random.random()))
        return super().step(reply)


HOSTED = {"steady": Steady(), "fickle": Fickle()}


# --- processes --------------------------------------------------------------------------------------------------------


class Deployment:
    """Processes around one data folder, and every process that was ever seen there. Ends with nothing running."""

    def __init__(self, root: Path, cache: Path, model: Path, *, workers: int, **settings: str) -> None:
        """``workers``: how many the service starts by itself for the model."""
        self.data = root / "data"
        self.model = str(model)
        self.logs = root / "said"
        self.logs.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = SETTINGS | {"port": str(self.port), "workers": str(workers)} | settings
        given |= {"models": self.model} if workers else {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
        self._environment |= {"ROOKERY_DATA": str(self.data), "ROOKERY_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        self._environment |= {f"ROOKERY_{name.upper()}": value for name, value in given.items()}
        self.service: subprocess.Popen[bytes] | None = None
        self.joined: dict[str, subprocess.Popen[bytes]] = {}
        """Workers that joined by hand, and hosts of environments of one's own, by name."""
        self._client: Client | None = None
        self._left: set[str] = set()

    def __enter__(self) -> Deployment:
        self.serve()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._client is not None:
            self._client.close()
        try:
            if kind is None:
                self.shut_down()
        finally:
            for process in [self.service, *self.joined.values()]:
                if process is not None:
                    process.kill()
                    process.wait()
            self.check_no_orphans()

    def shut_down(self) -> None:
        """Everybody is asked to end, and does so well."""
        for name in list(self.joined):
            process = self.joined.pop(name)
            process.terminate()
            code = process.wait(PATIENCE_SECONDS)
            assert code == 0, f"{name} ended with {code}:\n{self.log_tail(name)}"
        assert self.service is not None
        self.service.terminate()
        assert self.service.wait(PATIENCE_SECONDS) == 0, self.log_tail("service")

    def serve(self) -> None:
        """``rookery serve``; on return it answers, and what a crash left half-written is gone."""
        self._left = self.staged_files()
        self.service = self._start("service", ["-m", "rookery.cli", "serve"])
        wait_until(self._answers, "the service answers")
        assert not self._left & self.staged_files(), "what was half-written when the service died is still there"

    def join(self, name: str, *arguments: str) -> None:
        """``rookery worker --connect``; on return the service knows it."""
        token = {TOKEN_VARIABLE: (self.data / "worker.token").read_text().strip()}
        command = ["worker", "--connect", self.url, "--model", self.model, "--name", name, *arguments]
        self.joined[name] = self._start(name, ["-m", "rookery.cli", *command], **token)

    def host(self) -> None:
        """A user's process that offers :data:`HOSTED`."""
        self.joined["host"] = self._start("host", ["-m", "tests.chaos.driver", self.url], ROOKERY_KEY=self.key)

    @property
    def key(self) -> str:
        return (self.data / "admin.key").read_text().strip()

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.url, self.key, settings=Settings.load({}, data=self.data))
        return self._client

    def metric_total(self, name: str) -> int:
        """One of the service's figures since it started."""
        for line in httpx.get(f"{self.url}/metrics", timeout=PATIENCE_SECONDS).text.splitlines():
            if line.startswith(f"rookery_{name}_total "):
                return int(float(line.split()[1]))
        raise AssertionError(f"the service has no figure {name}")

    def worker(self, name: str) -> Any:
        """The service's view of a worker, or None."""
        return next((row for row in self.client.workers() if row.name == name), None)

    def wait_serving(self, name: str) -> Any:
        """Waits until the worker serves, and has said so with a beat."""
        row = wait_until(
            lambda: (row := self.worker(name)) is not None and row.state == "serving" and row.beat and row,
            f"worker {name} serves",
        )
        assert row
        return row

    def child(self, kind: str) -> psutil.Process:
        """The service's own child, of :data:`CHILDREN`; waits for one that is there."""
        assert self.service is not None
        parent = psutil.Process(self.service.pid)

        def found() -> psutil.Process | None:
            for process in parent.children():
                try:
                    if any(CHILDREN[kind] in part for part in process.cmdline()):
                        return process
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
            return None

        return wait_until(found, f"the service has a child for {kind}")

    def kill(self, victim: str) -> None:
        """``kill -9``, and whoever has nobody to start it again is started again."""
        if victim in ("worker", "environments"):
            self.child(victim).kill()
        elif victim == "service":
            self._kill_service()
            self.serve()
        elif victim == "everything":
            joined = list(self.joined)
            for name in joined:
                self.joined[name].kill()
            self._kill_service()
            for name in joined:
                self.joined.pop(name).wait()
            self.check_no_orphans()
            self.serve()
            for name in joined:
                self._restart(name)
        else:
            self.leave(victim)
            self._restart(victim)

    def leave(self, name: str) -> None:
        """``kill -9`` of a worker that joined; nobody starts it again."""
        process = self.joined.pop(name)
        process.kill()
        process.wait()

    def _restart(self, name: str) -> None:
        if name == "host":
            self.host()
        else:
            self.join(name)

    def _kill_service(self) -> None:
        """Its children are killed by nobody: they have to notice."""
        assert self.service is not None
        children = psutil.Process(self.service.pid).children(recursive=True)
        self.service.kill()
        self.service.wait()
        wait_until(lambda: not [child for child in children if alive(child)], "the service's children end with it")

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this town, whoever started it."""
        mark = self._environment["ROOKERY_DATA"]
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ROOKERY_DATA") == mark and alive(process) and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def check_no_orphans(self) -> None:
        """Waits until no process of this town is left; fails when one stays."""
        try:
            wait_until(lambda: not self.processes(), "every process has ended")
        except AssertionError:
            left = {process.pid: process.cmdline() for process in self.processes()}
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"orphans: {left}") from None

    def staged_files(self) -> set[str]:
        """The half-written files among the artifacts."""
        folder = self.data / "artifacts" / ".staging"
        return set(os.listdir(folder)) if folder.exists() else set()

    def log(self, name: str) -> str:
        """All that it logged."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def log_tail(self, name: str) -> str:
        """For a failure's message."""
        return self.log(name)[-4000:]

    def _answers(self) -> bool:
        assert self.service is not None and self.service.poll() is None, self.log_tail("service")
        try:
            return httpx.get(f"{self.url}/healthz", timeout=PATIENCE_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    def _start(self, name: str, arguments: list[str], **more: str) -> subprocess.Popen[bytes]:
        with (self.logs / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=Path(__file__).parents[2],
                env=self._environment | more,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    # --- what the database says ---------------------------------------------------------------------------------------

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Read from the service's database, alive or dead."""
        connection = sqlite3.connect(f"file:{self.data / 'rookery.db'}?mode=ro", uri=True, timeout=PATIENCE_SECONDS)
        try:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(query, values)]
        finally:
            connection.close()

    def wait_for_episodes(self, jobs: list[Job], moment: tuple[int, float]) -> None:
        """Waits until so many episodes of the jobs have ended, and so many seconds more."""
        count, seconds = moment
        wait_until(lambda: self.episodes_ended(jobs) >= count, f"{count} episodes have ended")
        time.sleep(seconds)

    def episodes_ended(self, jobs: Iterable[Job]) -> int:
        names = [job.id for job in jobs]
        marks = ",".join("?" * len(names))
        query = f"select count(*) as n from episodes where job in ({marks}) and state in ('done', 'failed')"
        return int(self.rows(query, *names)[0]["n"])


async def _host(url: str) -> None:
    running = asyncio.create_task(Host(url, os.environ["ROOKERY_KEY"], HOSTED).run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


if __name__ == "__main__":
    asyncio.run(_host(sys.argv[1]))
