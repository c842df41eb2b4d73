"""Worker and environment processes on this machine, for as long as the service lives.

Promises:

* A child ends with this process, however that ends: it holds the reading end of a pipe and leaves when that closes.
* A child that ends by itself is started again, after pauses that grow while it keeps failing. One that says that
  starting it again cannot help (exit code :data:`~rookery.errors.EXIT_REFUSED`) is left alone, with its last words.
* ``stop`` asks first (SIGTERM: a worker drains), and kills what has not ended in time, even if it is stopped.
* Tokens travel in the environment, where other users of the machine cannot read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rookery.aio import wait_event
from rookery.cluster.allocator import preloaded
from rookery.errors import EXIT_REFUSED
from rookery.settings import TOKEN_VARIABLE, Settings

log = logging.getLogger("rookery.cluster")

FIRST_PAUSE_SECONDS = 0.5
"""Before a child that ended is started again; doubles up to …"""
LONGEST_PAUSE_SECONDS = 30.0
"""… this: a machine that is out of memory must not be kept busy by starting processes."""
HEALTHY_SECONDS = 60.0
"""A child that lived this long was well: the next pause is the first again."""
LOG_BYTES = 16 << 20
"""A child's log above this size makes room for a new one when the child starts: as much as the service's own."""

_PRIVATE = {"key", "database"}
"""Settings that children do not need and that may hold secrets."""

State = Literal["starting", "running", "waiting", "refused", "stopped"]


@dataclass
class Child:
    """One process to keep alive. ``arguments`` follow ``python -m``; ``reason`` tells why it is not running."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    state: State = "starting"
    pid: int = 0
    restarts: int = 0
    reason: str = ""


class LocalProcesses:
    """Starts children and keeps them alive until stopped. Belongs to one event loop."""

    def __init__(self, children: Iterable[Child], logs: Path, stop_seconds: float) -> None:
        """Each child's output goes to ``logs/<name>.log``."""
        self.children = list(children)
        self._logs = logs
        self._stop_seconds = stop_seconds
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self.children]

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        self._stopping.set()
        for process in self._processes.values():
            process.terminate()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=self._stop_seconds)
        for name, process in self._processes.items():
            log.warning("%s has not ended in %.0f s and is killed", name, self._stop_seconds)
            process.kill()
        await asyncio.gather(*self._keepers)

    async def _keep(self, child: Child) -> None:
        """Keep one child alive until stopped."""
        path = self._logs / f"{child.name}.log"
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            began = time.monotonic()
            code: int | None = None
            try:
                code = await self._live(child, path)
            except OSError as error:  # no memory for it, no room for its log: may pass
                child.reason = f"could not be started: {error}"
            else:
                ended = f"signal {-code}" if code < 0 else f"code {code}"
                child.reason = f"ended with {ended}: {last_words(path)}"
            if self._stopping.is_set():
                break
            if code == EXIT_REFUSED:
                child.state = "refused"
                log.error("%s cannot work and is not started again: %s", child.name, last_words(path))
                return
            if time.monotonic() - began > HEALTHY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            child.state = "waiting"
            child.restarts += 1
            log.warning("%s %s (%s); it is started again in %.1f s", child.name, child.reason, path, pause)
            await wait_event(self._stopping, pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        child.state = "stopped"

    async def _live(self, child: Child, path: Path) -> int:
        """One life of a child; how it ended (negative: by this signal)."""
        process = await self._spawn(child, path)
        self._processes[child.name] = process
        child.state, child.pid = "running", process.pid
        if self._stopping.is_set():  # since the spawning began
            process.terminate()
        code = await process.wait()
        del self._processes[child.name]
        child.pid = 0
        return code

    async def _spawn(self, child: Child, path: Path) -> asyncio.subprocess.Process:
        _rotate(path)
        with path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *child.arguments,
                stdin=asyncio.subprocess.PIPE,  # never written to: its end tells the child that this process is gone
                stdout=output,
                stderr=output,
                env=child.environment,
                start_new_session=True,  # Ctrl-C is for the service, which then ends its children in order
            )


class LocalWorkers(LocalProcesses):
    """The workers that a service starts by itself: ``settings.server.workers`` for each of
    ``settings.server.models``."""

    def __init__(self, settings: Settings, url: str, token: str) -> None:
        models = [model.strip() for model in settings.server.models.split(",") if model.strip()]
        everybody = len(models) * settings.server.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = settings.worker.threads or max(1, cores // max(1, everybody))
        environment = _environment(settings.replace(threads=threads), token)
        environment = preloaded(environment, settings.worker.allocator)
        super().__init__(
            (
                Child(
                    f"worker-{_plain(model)}-{number}",
                    [
                        "rookery.worker.process",
                        *("--connect", url, "--model", model, "--name", f"local-{_plain(model)}-{number}"),
                        "--die-with-parent",
                    ],
                    environment,
                )
                for model in models
                for number in range(1, settings.server.workers + 1)
            ),
            settings.data / "logs",
            settings.server.stop_seconds,
        )


class LocalHost(LocalProcesses):
    """The process that runs the built-in environments."""

    def __init__(self, settings: Settings, url: str, token: str) -> None:
        arguments = ["rookery.environments.process", "--connect", url, "--die-with-parent"]
        super().__init__(
            [Child("environments", arguments, _environment(settings, token))],
            settings.data / "logs",
            settings.server.stop_seconds,
        )


def _rotate(path: Path) -> None:
    """A log that has grown large becomes the old one, of which there is one. Only between two lives: a process keeps
    writing to the file that it was given."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))


def last_words(path: Path) -> str:
    """The last line of a log, which may have been taken away."""
    lines: list[str] = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def _environment(settings: Settings, token: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The child's environment: this process's settings, however they were given, less what it must not know."""
    private = {f"ROOKERY_{name.upper()}" for name in _PRIVATE}
    given = {f"ROOKERY_{name.upper()}": str(value) for name, value in settings.flat().items()}
    return {name: value for name, value in {**inherited, **given}.items() if name not in private} | {
        TOKEN_VARIABLE: token
    }


def _plain(model: str) -> str:
    """A model's name as part of a file's name: of a path, the last part."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])
