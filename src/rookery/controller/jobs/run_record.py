"""The present work of the service for its jobs, in a small file that outlives the process: the evidence of a crash.

It is written where it changes and, by a thread, several times a second while a job starts, because memory may grow
within one call. All files are read and written in threads: the event loop waits for no disk. The record is not synced:
after a power cut there is no evidence, and nobody is a suspect. An orderly stop removes it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from rookery.clock import Clock
from rookery.scheduling.crashes import LastRun, Starting

SAMPLE_SECONDS = 0.25
"""Between two looks at the memory: an allocation of a gigabyte takes about as long."""

T = TypeVar("T")

_PAGE = os.sysconf("SC_PAGE_SIZE")


class RunRecord:
    """The record of this process at ``path``. It is changed in the event loop. A disk that refuses it costs the
    evidence only."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        """Held for a change, never while a file is read or written."""
        self._writing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "run record")
        """It writes the changes in their order, and waits for nobody else's work."""
        self._run: LastRun | None = None

    async def begin(self) -> tuple[LastRun | None, str]:
        """Begin the record of this process; returns what the last one left, None after an orderly stop, and the
        machine's present start."""
        return await self._in_thread(self._begin)

    async def starts(self, job: str) -> None:
        """The service begins to work on the job's start. The record is written on return."""
        memory = await self._in_thread(_memory)
        self._change(job, Starting(self._clock.monotonic(), memory))
        await self._in_thread(self._write)

    async def assembled(self, job: str) -> None:
        """Its data, model and environment are there."""
        known = self._run.jobs.get(job) if self._run is not None else None
        if known is not None:
            self._change(job, replace(known, assembling=False))
            await self._in_thread(self._write)

    def started(self, job: str) -> None:
        """It has trained a step, has run for a while, or has ended. The record is written soon."""
        if self._run is not None and job in self._run.jobs:
            self._change(job, None)
            self._in_thread(self._write)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Within, a thread looks at the memory while a job starts."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_SECONDS):
                if self._run is not None and self._run.jobs:
                    self._write()

        thread = threading.Thread(target=watch, name="run record", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    async def close(self) -> None:
        """The process ends in order."""
        with self._lock:
            self._run = None
        await self._in_thread(self._remove)
        self._thread.shutdown(wait=False)

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _change(self, job: str, start: Starting | None) -> None:
        with self._lock:
            if self._run is None:
                return
            jobs = {id: known for id, known in self._run.jobs.items() if id != job}
            if start is not None:
                jobs[job] = start
            self._run = replace(self._run, jobs=jobs)

    # --- in threads ---------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[LastRun | None, str]:
        last, boot, now = self._left(), _boot(), self._clock.monotonic()
        short = last.short_lives if last is not None else 0
        with self._lock:
            self._run = LastRun(boot, now, now, _memory(), short)
        self._write()
        return last, boot

    def _write(self) -> None:
        with self._writing:
            memory = _memory()
            with self._lock:
                if self._run is None:
                    return
                run = self._run = replace(self._run, now=self._clock.monotonic(), memory=memory)
            part = self.path.with_name(f".{self.path.name}")
            with suppress(OSError):
                part.write_bytes(msgspec.json.encode(run))
                part.replace(self.path)

    def _remove(self) -> None:
        with self._writing, suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _left(self) -> LastRun | None:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=LastRun)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


def _boot() -> str:
    """The present start of this machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _memory() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
