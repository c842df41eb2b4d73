"""A process that runs environments of another library, in the virtual environment that the administrator names.

It reads and writes lines of JSON. Its first is ``{"ready": …}`` or ``{"refused": …}``; later ones name an episode.
It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.errors import UserError, short
from rookery.folders import temporary_file

START_SECONDS = 600.0
"""Longest time from the start of a process until it is ready. A package that loads a data set for the first time takes
minutes; one that takes longer hangs."""

END_SECONDS = 10.0
"""Time that a process has to end after its input."""

UNREAD = 64 << 20
"""Most characters of lines that wait until a process reads them. One that reads none for so long hangs."""

INHERITED = re.compile(
    r"HOME|USER|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|XDG_(?:CACHE|DATA|CONFIG)_HOME|HF_\w+"
    r"|NLTK_DATA|TIKTOKEN_CACHE_DIR|UV_\w+|PIP_\w+|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(?i:(?:https?|all|no)_proxy)"
)
"""Variables that the process of an environment gets from the service: what downloads need, and no key of the service,
of its judges or of its storage."""


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """The service's variables that the process of an environment gets."""
    return {name: value for name, value in variables.items() if INHERITED.fullmatch(name)}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with a library, and the names in it that jobs may use."""

    python: str
    names: tuple[str, ...]


def parse_installed(text: str, setting: str, name: str, holds: str) -> Installed | None:
    """A setting of the form ``PYTHON NAME [NAME …]``. Raises :class:`UserError`."""
    parts = text.split()
    if not parts:
        return None
    if len(parts) < 2 or not Path(parts[0]).is_absolute():
        raise UserError(
            f"setting {setting}: given {short(text)!r}, allowed: PYTHON {name} [{name} …], where PYTHON is the path of"
            f" the interpreter that has {holds}"
        )
    return Installed(parts[0], tuple(parts[1:]))


class LibraryFailed(RuntimeError):
    """An episode, or the process of all, failed; one line."""


class LibraryProcess:
    """The process of one environment. Its messages about an episode are put where that episode waits."""

    def __init__(
        self, library: str, python: str, script: Path, given: Mapping[str, Any], start_seconds: float = START_SECONDS
    ) -> None:
        """Returns when the environment serves, within ``start_seconds``. Blocks; raises :class:`UserError`."""
        self._library = library
        binaries = str(Path(python).parent)  # with programs that the library starts
        environment = inherited(os.environ)
        temporary_file().close()  # the process works in a temporary folder
        environment["PATH"] = f"{binaries}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(script), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise UserError(f"{library}: {python} does not start ({error.strerror})") from None
        self.tenant = ""
        """The tenant whose episode was the first since the process last had none; changed by the pool."""
        self.episodes = 0
        """The number of its running episodes; changed by the pool."""
        self.since = time.monotonic()
        """When it last changed between having episodes and having none (monotonic seconds); changed by the pool."""
        self.draining = False
        """It gets no further episode, because another tenant waits for its place; changed by the pool."""
        self._ending = False
        self._input = _Input()
        self._end = weakref.finalize(self, _end, self._process, self._input)
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]] = {}
        process, waiting = self._process, self._waiting  # not self, which the threads would keep alive
        first: Future[dict[str, Any]] = Future()
        reading = (library, process, first, waiting)
        threading.Thread(target=_deliver, args=reading, daemon=True, name=library).start()
        threading.Thread(target=_write, args=(process, self._input), daemon=True, name=f"input of {library}").start()
        threading.Thread(target=_end_children, args=(process,), daemon=True, name=f"end of {library}").start()
        try:
            self.ready = first.result(start_seconds)
        except TimeoutError:
            self.kill()
            raise UserError(
                f"environment.id: the process of {library} was not ready within {start_seconds:g} s and was killed; see"
                " the service's standard error, and load what it downloads in advance"
            ) from None
        if "refused" in self.ready:
            self._end()
            raise UserError(f"environment.{self.ready['refused']}")

    def alive(self) -> bool:
        return not self._ending and self._process.poll() is None

    def end(self) -> None:
        """End the process; no episode is in it."""
        self._ending = True
        self._end()

    def kill(self) -> None:
        """End the process at once, and what it started."""
        _kill(self._process)

    def send(self, message: Mapping[str, Any]) -> None:
        """Returns at once, whether the process reads or not. Raises :class:`LibraryFailed`."""
        if not self.alive():
            raise LibraryFailed(f"{self._library}: its process has ended")
        if not self._input.put(json.dumps(message) + "\n"):
            raise LibraryFailed(f"{self._library}: its process reads nothing; {UNREAD >> 20} MB wait for it")

    def listen(self, episode: str) -> asyncio.Queue[dict[str, Any]]:
        """Where the messages about an episode arrive, in the running loop."""
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting[episode] = (asyncio.get_running_loop(), inbox)
        return inbox

    def forget(self, episode: str) -> None:
        self._waiting.pop(episode, None)


class _Input:
    """The lines that wait until a process reads them."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._size = 0

    def put(self, line: str) -> bool:
        """False where too many wait."""
        with self._lock:
            if self._size + len(line) > UNREAD:
                return False
            self._size += len(line)
        self._lines.put(line)
        return True

    def end(self) -> None:
        """No further line comes."""
        self._lines.put("")

    def take(self) -> str:
        """The next line; empty at the end. Blocks."""
        line = self._lines.get()
        with self._lock:
            self._size -= len(line)
        return line


def _write(process: subprocess.Popen[str], lines: _Input) -> None:
    """Gives a process its lines, one after the other, and closes its input after the last one, or when it has ended."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:
        while line := lines.take():
            process.stdin.write(line)
            process.stdin.flush()


def _deliver(
    library: str,
    process: subprocess.Popen[str],
    first: Future[dict[str, Any]],
    waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]],
) -> None:
    """Reads the messages of a process until its output ends: the first into ``first``, the others to their episodes."""
    assert process.stdout is not None
    reason = ""
    try:
        with process.stdout:
            for line in process.stdout:
                message = json.loads(line)
                where = waiting.get(message.get("episode") or message.get("ended"))
                if first.done():
                    _put(where, message)
                else:
                    first.set_result(message)
    except (ValueError, AttributeError, RecursionError):  # no JSON, or no object
        reason = "wrote a line that is no message"
        _kill(process)
    code = process.wait()
    reason = reason or f"ended with {code}"
    if not first.done():
        first.set_result({"refused": f"id: its process {reason} as it started; see the service's standard error"})
    ended = {"error": f"{library}: its process {reason}"}
    for one in list(waiting.values()):
        _put(one, ended)


def _end_children(process: subprocess.Popen[str]) -> None:
    """Kills what a process has started and left when it ends."""
    process.wait()
    _kill_group(process)


def _put(
    where: tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]] | None, message: dict[str, Any]
) -> None:
    """Gives a message to an episode that waits in a loop, from a thread."""
    if where is not None:
        loop, inbox = where
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(inbox.put_nowait, message)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and what it started. Where it has ended, :func:`_end_children` does."""
    if process.poll() is None:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str], lines: _Input) -> None:
    """Ends a process by the end of its input, and kills it where that takes longer than :data:`END_SECONDS`."""
    lines.end()
    killing = threading.Timer(END_SECONDS, _kill, (process,))
    killing.daemon = True
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        killing.start()
