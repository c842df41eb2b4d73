"""Keeps child processes alive.

Promises:

* A child ends with this process, however this process ends: the child exits when its standard input closes.
* A child that ends is restarted, with a pause that grows while it keeps failing; so is one that cannot be started or
  watched, whatever the error is. The loss of its machine is no failure (:data:`NODE_LOST`). A child whose exit code
  says that a restart cannot help (:data:`~rookery.errors.EXIT_REFUSED`) is not restarted until
  :meth:`Supervisor.retry`; its last log line is reported.
* Whoever waits for a child learns that it does not work: one that is not restarted, and one that has ended
  :data:`SAME_ENDS` times in a row in the same way, are reported, the latter after each further end.
  :attr:`Child.failure` has the reason until it works again.
* ``stop`` sends SIGTERM first (a worker drains) and kills a child that has not ended in time, even a stopped one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rookery.aio import in_new_thread, wait_event
from rookery.children import child_variables, interpreter
from rookery.errors import EXIT_REFUSED
from rookery.turns import service_task

log = logging.getLogger("rookery.cluster")

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first restart of a child; each further pause is twice as long."""
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause before a restart: a machine without free memory must not be kept busy by starting processes."""
HEALTHY_SECONDS = 60.0
"""After a child has run this long, its next pause is the first again."""
SAME_ENDS = 3
"""Ends of a child in the same way after which it is reported: a fault that passes does not come three times."""
ROW_SECONDS = 3600.0
"""Ends of a child that are further apart are not in a row: a fault that comes once a day is no loop."""
_FROM_OUTSIDE = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
"""Ends that say nothing about the child: somebody wanted them, or the machine had no memory."""
_LOG_PREFIX = re.compile(r"^[\d-]+ [\d:,.]+ [A-Z]+ [\w.]+: ")
NODE_LOST = 256
"""In place of the exit code of a child that was lost with its machine: no process can end with it."""
LOG_BYTES, LOG_SECONDS = 16 << 20, 30.0
"""A child's log that is larger is rotated when the child starts, or at one of the looks at it while it runs; the
service's log has the same limit. Libraries of environments write what they like."""

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
    model: str = ""
    """The base model that it serves, of a worker."""
    worker: str = ""
    """The name by which the service knows it, of one worker."""
    ends: list[str] = field(default_factory=list)
    """How it ended, the last times in a row in the same way."""
    ended: float = 0.0
    """When it ended last (monotonic seconds)."""
    failure: str = ""
    """Why it does not work; empty where it works, or may."""


class Process(Protocol):
    """A started child, such as ``asyncio.subprocess.Process``."""

    pid: int

    async def wait(self) -> int:
        """Its exit code, negative for a signal, or :data:`NODE_LOST`."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """End it at once."""


Spawn = Callable[[Child, Path], Awaitable[Process]]
"""Starts a child that writes to the given log."""


class Supervisor:
    """Starts children and keeps them alive until stopped. Belongs to one event loop."""

    def __init__(
        self,
        children: Iterable[Child],
        logs: Path,
        stop_seconds: float,
        spawn: Spawn | None = None,
        failed: Callable[[Child, str], None] = lambda child, reason: None,
        remove_seconds: float = 0.0,
        pauses: tuple[float, float] = (FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS),
        log_limit: tuple[int, float] = (LOG_BYTES, LOG_SECONDS),
    ) -> None:
        """A child has ``stop_seconds`` to end when all are stopped, and at least ``remove_seconds`` when it is removed.
        Each child's output goes to ``logs/<name>.log``. ``spawn`` None starts a process on this machine.
        ``failed(child, reason)`` is called for a child that does not work. ``pauses``: the first and the longest one
        before a restart, in seconds. ``log_limit``: the largest log, and the seconds between two looks at it."""
        self._pauses = pauses
        self._log_bytes, self._log_seconds = log_limit
        self._failed = failed
        self._spawn = spawn or spawn_process
        self.children = list(children)
        self.running = False
        self._logs = logs
        self._stop_seconds = stop_seconds
        self._remove_seconds = max(stop_seconds, remove_seconds)
        self._processes: dict[Child, Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        self.running = True
        self._keep_alive(self.children)

    def add(self, children: Iterable[Child]) -> None:
        """Further children; they are started at once if the others are."""
        new = list(children)
        self.children += new
        if self.running:
            self._keep_alive(new)

    def retry(self, children: Iterable[Child]) -> None:
        """Start those of these children again that refused to start: the cause may have passed."""
        refused = [child for child in children if child.state == "refused"] if self.running else []
        for child in refused:
            child.state, child.failure = "starting", ""
        self._keep_alive(refused)

    def _keep_alive(self, children: list[Child]) -> None:
        """Start the keepers of these; those that have ended are not held."""
        self._keepers = [keeper for keeper in self._keepers if not keeper.done()]
        self._keepers += [service_task(self._keep(child)) for child in children]

    def remove(self, children: Iterable[Child]) -> None:
        """End these children: with SIGTERM, and SIGKILL if they have not ended in time."""
        for child in children:
            self.children.remove(child)
            child.removed = True
            if child in self._processes:
                _signal(self._processes[child].terminate)
                asyncio.get_running_loop().call_later(self._remove_seconds, self._kill, child, self._remove_seconds)

    def _kill(self, child: Child, seconds: float) -> None:
        if child in self._processes:
            log.warning("killing %s: it has not ended within %.0f s", child.name, seconds)
            _signal(self._processes[child].kill)

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        self.running = False
        self._stopping.set()
        for process in self._processes.values():
            _signal(process.terminate)
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=self._stop_seconds)
        for child in self._processes:
            self._kill(child, self._stop_seconds)
        await asyncio.gather(*self._keepers)

    async def _keep(self, child: Child) -> None:
        """Keep one child alive until stopped."""
        path = self._logs / f"{child.name}.log"
        pause = self._pauses[0]
        while not self._stopping.is_set() and not child.removed:
            began = time.monotonic()
            code: int | None = None
            try:
                code = await self._live(child, path)
            except Exception as error:  # no memory, no thread, no room for its log, no answer of Ray: temporary
                done = "watched" if child.state == "running" else "started"
                child.reason = f"could not be {done}: {' '.join(str(error).split()) or type(error).__name__}"
            else:
                ended = f"signal {-code}" if code < 0 else f"code {code}"
                child.reason = f"ended with {ended}: {last_line(path)}"
            if self._stopping.is_set() or child.removed:
                break
            if code == EXIT_REFUSED:
                line = _LOG_PREFIX.sub("", last_line(path))
                child.state, child.failure = "refused", f"ended with code {code}: {line}"
                log.error("%s refused to start and is not restarted: %s", child.name, last_line(path))
                self._failed(child, line)
                return
            self._count(child, code, child.reason)
            if code == NODE_LOST or time.monotonic() - began > HEALTHY_SECONDS:
                pause = self._pauses[0]
            child.state = "waiting"
            child.restarts += 1
            log.warning("%s %s (%s); restarting it in %.1f s", child.name, child.reason, path, pause)
            await wait_event(self._stopping, pause)
            pause = min(2 * pause, self._pauses[1])
        child.state = "stopped"

    def _count(self, child: Child, code: int | None, reason: str) -> None:
        """Report a child that always ends in the same way, whatever the numbers in its last line are."""
        before, child.ended, child.failure = child.ended, time.monotonic(), ""
        if code in _FROM_OUTSIDE or code == NODE_LOST:
            child.ends.clear()
            return
        same = re.sub(r"\d+", "0", reason)
        last = child.ends if child.ended - before <= ROW_SECONDS else []
        child.ends = [*(end for end in last if end == same), same][-SAME_ENDS:]
        if len(child.ends) == SAME_ENDS:
            head, _, line = reason.partition(": ")
            child.failure = f"{SAME_ENDS} times in a row it {head}: {_LOG_PREFIX.sub('', line)}"
            self._failed(child, child.failure)

    async def _live(self, child: Child, path: Path) -> int:
        """Run a child until it ends. Returns its exit code, negative for a signal."""
        path.parent.mkdir(exist_ok=True)  # somebody may have deleted it
        _rotate(path, self._log_bytes)
        process = await self._spawn(child, path)
        self._processes[child] = process
        child.state, child.pid = "running", process.pid
        if self._stopping.is_set() or child.removed:  # while it was being started
            _signal(process.terminate)
        healthy = asyncio.get_running_loop().call_later(HEALTHY_SECONDS, setattr, child, "failure", "")
        watching = asyncio.create_task(_watch_log(path, self._log_bytes, self._log_seconds))
        try:
            return await process.wait()
        except Exception:
            with contextlib.suppress(Exception):
                process.kill()  # else a second one would run at the same time
            raise
        finally:
            healthy.cancel()
            watching.cancel()
            del self._processes[child]
            child.pid = 0


async def spawn_process(child: Child, path: Path) -> Process:
    """A child process of this one, with its output in ``path``. Raises OSError."""
    with path.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *interpreter(*child.arguments),
            stdin=asyncio.subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=output,
            stderr=output,
            env=child_variables(child.environment),
            start_new_session=True,  # Ctrl-C reaches the service alone, which then ends its children in order
        )


def _signal(send: Callable[[], None]) -> None:
    """A process may end before its keeper has heard of it."""
    with contextlib.suppress(ProcessLookupError):
        send()


def _rotate(path: Path, most: int) -> None:
    """Rename a log of more than ``most`` bytes; one old log is kept. Called only while the child is not running: a
    process keeps writing to the file that it was given."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > most:
            path.replace(_old(path))


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


async def _watch_log(path: Path, most: int, seconds: float) -> None:
    """Bound the log of a running child, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        with contextlib.suppress(OSError):  # it was deleted, or its disk is away
            await in_new_thread(_shorten, path, most)


def _shorten(path: Path, most: int) -> None:
    """Keep the last ``most`` bytes of a log that has more as the old log, and empty it: its process appends to it.
    Where the disk has no room, the end is lost, too."""
    with path.open("r+b") as file:
        if (size := os.fstat(file.fileno()).st_size) <= most:
            return
        file.seek(size - most)
        try:
            with _old(path).open("wb") as old:
                shutil.copyfileobj(file, old)
        finally:
            file.truncate(0)


def last_line(path: Path) -> str:
    """The last line of a log, which may have been deleted, or be on a disk that cannot be read now."""
    lines: list[str] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
