"""Workers and environment hosts as child processes of the service on the same machine, or on the nodes of a Ray
cluster, where a child process for each model supervises them (:mod:`rookery.cluster.ray`).

Promises:

* A child ends with this process, however this process ends: the child exits when its standard input closes.
* A child that ends is restarted, with a pause that grows while it keeps failing; the loss of its machine is no failure
  (:data:`NODE_LOST`). A child whose exit code says that a restart cannot help
  (:data:`~rookery.errors.EXIT_REFUSED`) is not restarted; its last log line is reported.
* ``stop`` sends SIGTERM first (a worker drains) and kills a child that has not ended in time, even a stopped one.
* Tokens are passed in the environment, where other users of the machine cannot read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rookery.aio import interpreter, wait_event
from rookery.errors import EXIT_REFUSED
from rookery.settings import TOKEN_VARIABLE, Settings

PRELOAD = "LD_PRELOAD"


class Cluster(Protocol):
    """Starts the workers of a service, which then connect to it by themselves."""

    async def start(self) -> None:
        """Start the workers of the service's base models, and the host of the built-in environments."""

    def provide(self, model: str) -> None:
        """Make sure that there are workers for ``model``; called when a job names it."""

    def release(self, model: str) -> None:
        """End the workers that :meth:`provide` started for ``model``; called when nothing has used it for a while."""

    async def stop(self) -> None:
        """End every process that was started."""


def preloaded(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """``environment`` for a process that loads the allocator library ``name`` (as a linker names it) if this machine
    has it. It is unchanged when the name is empty, or when an allocator (tcmalloc, jemalloc, mimalloc) is already
    chosen.

    A training or decode step allocates hundreds of tensors and frees them. The C library's allocator reuses the blocks
    of a heap in turn, so a worker that has run for a while computes in memory that no cache holds; tcmalloc reuses the
    most recently freed block. Measured with two cores on the 135M model: a decode step of 64 rows takes 67 to 72 ms
    with the C library's allocator and 60 to 63 ms with tcmalloc; a job on a worker that had served 32 tenants before
    takes 18.5 and 15.1 s of compute, on a fresh worker 16.5 s with either. The allocator is chosen by the process
    environment; no Python package provides one.
    """
    before = environment.get(PRELOAD, "")
    if not name or "malloc" in before:
        return dict(environment)
    found = find_library(name)
    return {**environment, PRELOAD: f"{found} {before}".strip()} if found else dict(environment)


log = logging.getLogger("rookery.cluster")

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first restart of a child; each further pause is twice as long."""
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause before a restart: a machine without free memory must not be kept busy by starting processes."""
HEALTHY_SECONDS = 60.0
"""After a child has run this long, its next pause is the first again."""
NODE_LOST = 256
"""In place of the exit code of a child that was lost with its machine: no process can end with it."""
LOG_BYTES = 16 << 20
"""A child's log that is larger is rotated when the child starts; the service's own log has the same limit."""

_PRIVATE = {"key", "database"}
"""Settings that children do not need and that may contain secrets."""

State = Literal["starting", "running", "waiting", "refused", "stopped"]


@dataclass(eq=False)
class Child:
    """One process to keep alive. ``arguments`` follow ``python -m``; ``reason`` says why it is not running."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    state: State = "starting"
    pid: int = 0
    restarts: int = 0
    reason: str = ""
    removed: bool = False
    """It ends, and is not restarted."""


class Process(Protocol):
    """A started child, such as ``asyncio.subprocess.Process``."""

    pid: int

    async def wait(self) -> int:
        """Its exit code, negative for a signal, or :data:`NODE_LOST`."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """End it at once."""


class Supervisor:
    """Starts children and keeps them alive until stopped. Belongs to one event loop."""

    def __init__(
        self,
        children: Iterable[Child],
        logs: Path,
        stop_seconds: float,
        spawn: Callable[[Child, Path], Awaitable[Process]] | None = None,
    ) -> None:
        """Each child's output goes to ``logs/<name>.log``. ``spawn`` starts a child that writes to the given log; None
        starts a process on this machine."""
        self._spawn = spawn or spawn_process
        self.children = list(children)
        self.running = False
        self._logs = logs
        self._stop_seconds = stop_seconds
        self._processes: dict[Child, Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        self.running = True
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self.children]

    def add(self, children: Iterable[Child]) -> None:
        """Further children; they are started at once if the others are."""
        new = list(children)
        self.children += new
        if self.running:
            self._keepers += [asyncio.create_task(self._keep(child)) for child in new]

    def remove(self, children: Iterable[Child]) -> None:
        """End these children: with SIGTERM, and SIGKILL if they have not ended in time."""
        for child in children:
            self.children.remove(child)
            child.removed = True
            if child in self._processes:
                self._processes[child].terminate()
                asyncio.get_running_loop().call_later(self._stop_seconds, self._kill, child)

    def _kill(self, child: Child) -> None:
        if child in self._processes:
            log.warning("killing %s: it has not ended within %.0f s", child.name, self._stop_seconds)
            self._processes[child].kill()

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        self.running = False
        self._stopping.set()
        for process in self._processes.values():
            process.terminate()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=self._stop_seconds)
        for child in self._processes:
            self._kill(child)
        await asyncio.gather(*self._keepers)

    async def _keep(self, child: Child) -> None:
        """Keep one child alive until stopped."""
        path = self._logs / f"{child.name}.log"
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set() and not child.removed:
            began = time.monotonic()
            code: int | None = None
            try:
                code = await self._live(child, path)
            except OSError as error:  # no memory, or no room for its log: temporary
                child.reason = f"could not be started: {error}"
            else:
                ended = f"signal {-code}" if code < 0 else f"code {code}"
                child.reason = f"ended with {ended}: {last_line(path)}"
            if self._stopping.is_set() or child.removed:
                break
            if code == EXIT_REFUSED:
                child.state = "refused"
                log.error("%s refused to start and is not restarted: %s", child.name, last_line(path))
                return
            if code == NODE_LOST or time.monotonic() - began > HEALTHY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            child.state = "waiting"
            child.restarts += 1
            log.warning("%s %s (%s); restarting it in %.1f s", child.name, child.reason, path, pause)
            await wait_event(self._stopping, pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        child.state = "stopped"

    async def _live(self, child: Child, path: Path) -> int:
        """Run a child until it ends. Returns its exit code, negative for a signal."""
        _rotate(path)
        process = await self._spawn(child, path)
        self._processes[child] = process
        child.state, child.pid = "running", process.pid
        if self._stopping.is_set() or child.removed:  # while it was being started
            process.terminate()
        code = await process.wait()
        del self._processes[child]
        child.pid = 0
        return code


async def spawn_process(child: Child, path: Path) -> Process:
    """A child process of this one, with its output in ``path``. Raises OSError."""
    with path.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *interpreter(*child.arguments),
            stdin=asyncio.subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=output,
            stderr=output,
            env=child.environment,
            start_new_session=True,  # Ctrl-C reaches the service alone, which then ends its children in order
        )


class ProcessCluster:
    """The processes that the service at ``url`` starts, on this machine or by way of Ray: workers for its base models,
    more when a job names another model, and the host of the built-in environments. They connect to the service by
    themselves."""

    def __init__(self, settings: Settings, url: str, token: str) -> None:
        self._settings = settings
        self._url = url
        self._token = token
        self._models = [model for model in settings.server.models.split(",") if model]
        self._provided: dict[str, list[Child]] = {}
        """Children by their base model, of those that the service was not configured with."""
        self.processes = Supervisor([], settings.data / "logs", settings.server.stop_seconds)

    async def start(self) -> None:
        """Raises UserError if the settings name a Ray cluster that does not answer."""
        if self._settings.cluster.cluster == "ray":
            from rookery.cluster import ray  # it imports this module

            await asyncio.to_thread(ray.check, self._settings.cluster.ray_address)
        self.processes.add(self._workers(self._models))
        host = ray_environment_host if self._settings.cluster.cluster == "ray" else environment_host
        self.processes.add([host(self._settings, self._url, self._token)])
        await self.processes.start()

    def _workers(self, models: Sequence[str]) -> list[Child]:
        make = ray_launchers if self._settings.cluster.cluster == "ray" else local_workers
        return make(self._settings, models, self._url, self._token)

    def provide(self, model: str) -> None:
        """Start workers for ``model`` if there are none, unless the service is configured to start none."""
        if model in self._models or model in self._provided:
            return
        if workers := self._workers([model]):
            log.info("starting a worker for base model %s", model)
            self._provided[model] = workers
            self.processes.add(workers)

    def release(self, model: str) -> None:
        """End the workers that :meth:`provide` started for ``model``."""
        if model in self._provided:
            log.info("ending the workers of base model %s, which nothing uses", model)
            self.processes.remove(self._provided.pop(model))

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        await self.processes.stop()


def local_workers(settings: Settings, models: Sequence[str], url: str, token: str) -> list[Child]:
    """``settings.server.workers`` workers for each of ``models``; they share the machine's cores and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, len(models) * settings.server.workers)
    threads, share = settings.worker.threads or max(1, cores // count), settings.worker.memory_share / count
    settings = settings.replace(threads=threads, memory_share=share)
    environment = preloaded(child_environment(settings, token), settings.worker.allocator)
    children = []
    for model in models:
        for number in range(1, settings.server.workers + 1):
            name = f"{file_name(model)}-{number}"
            arguments = ["--connect", url, "--model", model, "--name", f"local-{name}", "--die-with-parent"]
            children.append(Child(f"worker-{name}", ["rookery.worker.process", *arguments], environment))
    return children


def ray_launchers(settings: Settings, models: Sequence[str], url: str, token: str) -> list[Child]:
    """For each of ``models`` the process that keeps its workers alive on Ray's nodes."""
    if settings.server.workers + settings.cluster.ray_spot_workers == 0:
        return []
    environment = child_environment(settings, token)
    arguments = ["rookery.cluster.ray", "--connect", url, "--model"]
    return [Child(f"ray-{file_name(model)}", [*arguments, model], environment) for model in models]


def ray_environment_host(settings: Settings, url: str, token: str) -> Child:
    """The process that keeps the host of the built-in environments alive on one of Ray's nodes."""
    return Child("ray-environments", ["rookery.cluster.ray", "--connect", url], child_environment(settings, token))


def environment_host(settings: Settings, url: str, token: str) -> Child:
    """The process that runs the built-in environments."""
    arguments = ["rookery.environments.host", "--connect", url, "--die-with-parent"]
    return Child("environments", arguments, child_environment(settings, token))


def _rotate(path: Path) -> None:
    """Rename a log that has grown large; one old log is kept. Called only while the child is not running: a process
    keeps writing to the file that it was given."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))


def last_line(path: Path) -> str:
    """The last line of a log, which may have been deleted."""
    lines: list[str] = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def child_environment(settings: Settings, token: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The child's environment: the settings of this process, except those that it must not have."""
    private = {f"ROOKERY_{name.upper()}" for name in _PRIVATE}
    given = {f"ROOKERY_{name.upper()}": str(value) for name, value in settings.flat().items()}
    return {name: value for name, value in {**inherited, **given}.items() if name not in private} | {
        TOKEN_VARIABLE: token
    }


def file_name(model: str) -> str:
    """A model's name as part of a file name; of a path, its last part."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])
