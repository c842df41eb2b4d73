"""A process that runs environments of another library, in the virtual environment that the administrator names.

It reads and writes lines of JSON. Its first is ``{"ready": …}`` or ``{"refused": …}``; later ones name an episode.
It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.errors import UserError, short

INHERITED = re.compile(
    r"HOME|USER|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|XDG_(?:CACHE|DATA|CONFIG)_HOME|HF_\w+"
    r"|NLTK_DATA|TIKTOKEN_CACHE_DIR|UV_\w+|PIP_\w+|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(?i:(?:https?|all|no)_proxy)"
)
"""Variables that the process of an environment gets from the service: what downloads need, and no key of the service,
of its judges or of its storage."""


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of the service's variables that the process of an environment gets."""
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

    def __init__(self, library: str, python: str, script: Path, given: Mapping[str, Any]) -> None:
        """Returns when the environment serves. Blocks; raises :class:`UserError`."""
        self._library = library
        binaries = str(Path(python).parent)  # with programs that the library starts
        environment = inherited(os.environ)
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
        self._end = weakref.finalize(self, _end, self._process)
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]] = {}
        assert self._process.stdout is not None
        self.ready = self._read(self._process.stdout.readline())
        if "refused" in self.ready:
            self._end()
            raise UserError(f"environment.{self.ready['refused']}")
        process, waiting = self._process, self._waiting  # not self, which the thread would keep alive
        threading.Thread(target=_deliver, args=(library, process, waiting), daemon=True, name=library).start()

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises :class:`LibraryFailed`."""
        assert self._process.stdin is not None
        line = json.dumps(message) + "\n"
        with self._lock:
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                raise LibraryFailed(f"{self._library}: its process has ended") from None

    def listen(self, episode: str) -> asyncio.Queue[dict[str, Any]]:
        """Where the messages about an episode arrive, in the running loop."""
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting[episode] = (asyncio.get_running_loop(), inbox)
        return inbox

    def forget(self, episode: str) -> None:
        self._waiting.pop(episode, None)

    @staticmethod
    def _read(line: str) -> dict[str, Any]:
        if not line:
            return {"refused": "id: its process ended as it started; see the service's standard error"}
        message: dict[str, Any] = json.loads(line)
        return message


def _deliver(
    library: str,
    process: subprocess.Popen[str],
    waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]],
) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed
        for line in process.stdout:
            message = json.loads(line)
            _put(waiting.get(message.get("episode") or message.get("ended")), message)
    ended = {"error": f"{library}: its process ended with {process.wait()}"}
    for one in list(waiting.values()):
        _put(one, ended)


def _put(
    where: tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]] | None, message: dict[str, Any]
) -> None:
    """Gives a message to an episode that waits in a loop, from a thread."""
    if where is not None:
        loop, inbox = where
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(inbox.put_nowait, message)


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()  # it ends with its input


class LibraryProcesses:
    """The process of one environment, started again where it has ended. Thread-safe; blocks."""

    def __init__(self, library: str, python: str, script: Path, given: Mapping[str, Any]) -> None:
        self._arguments = (library, python, script, given)
        self._lock = threading.Lock()
        self._process: LibraryProcess | None = None
        self._episodes = itertools.count()

    def get(self) -> LibraryProcess:
        with self._lock:
            if self._process is None or not self._process.alive():
                self._process = LibraryProcess(*self._arguments)
            return self._process

    def next_name(self) -> str:
        """A name for another episode."""
        return f"episode-{next(self._episodes)}"
