"""Child processes in Python: the command that starts one, their processor time, their end with the parent."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

SEARCHED = "PYTHONPATH"

LEFT_OUT = ("PYTHONOPTIMIZE", "PYTHONINSPECT")
"""Variables of an interpreter that its children do not get: the 2 of the first removes docstrings that transformers
reads; with the second, a child would not end, but ask for input."""


def interpreter(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` in a child process with this interpreter, whose environment are
    :func:`child_variables`. It does not import from the working directory (``-P``): a ``random.py`` in a user's folder
    must neither replace the library's module nor run."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` for a process that :func:`interpreter` starts. An empty entry of ``PYTHONPATH`` means the working
    directory, also with ``-P``, and comes from ``PYTHONPATH=$PYTHONPATH:/x`` where the variable was not set: it is left
    out. So are :data:`LEFT_OUT`."""
    found = {name: value for name, value in environment.items() if name not in (SEARCHED, *LEFT_OUT)}
    entries = [entry for entry in environment.get(SEARCHED, "").split(os.pathsep) if entry]
    return found | ({SEARCHED: os.pathsep.join(entries)} if entries else {})


def lower_priority(niceness: int) -> None:
    """Give this process, the first of its session, a low priority against the processes of all sessions. Where Linux
    divides processor time by session (``sched_autogroup``), niceness alone counts within a session only."""
    os.nice(niceness)
    lower_session_priority(os.getpid(), niceness)


def lower_session_priority(process: int, niceness: int) -> None:
    """Give the session of another process a low priority against those of all sessions, where Linux divides processor
    time by session and permits it. The processes of the session have their niceness by themselves."""
    if (session := open_session(process)) is not None:
        try:
            set_session_priority(session, niceness)
        finally:
            os.close(session)


SESSION_TRIES, SESSION_PAUSE = 5, 0.1
"""Without privileges Linux changes the priority of one session in a tenth of a second."""


def open_session(process: int) -> int | None:
    """A descriptor for :func:`set_session_priority`; None where Linux does not divide processor time by session."""
    try:
        return os.open(f"/proc/{process}/autogroup", os.O_WRONLY)
    except OSError:
        return None


def set_session_priority(session: int, niceness: int, tries: int = SESSION_TRIES) -> bool:
    """Give a session that was opened a priority, not a negative one. False where the system had no time for it at any
    of the ``tries``."""
    for left in reversed(range(tries)):
        try:
            os.write(session, str(niceness).encode())
        except BlockingIOError:
            if left:
                time.sleep(SESSION_PAUSE)
        except OSError:  # it is not permitted
            return True
        else:
            return True
    return False


def lower_thread_priority(niceness: int) -> None:
    """Give the calling thread a lower priority than the other threads of its process, where the system can: Linux."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness))


_waited_for = threading.local()


def add_child_seconds(seconds: float) -> None:
    """A child process took so much processor time for what this thread waits for."""
    _waited_for.seconds = getattr(_waited_for, "seconds", 0.0) + seconds


def take_child_seconds() -> float:
    """The seconds that were added in this thread since the last call."""
    seconds, _waited_for.seconds = getattr(_waited_for, "seconds", 0.0), 0.0
    return seconds


def die_with_parent(end: Callable[[], None]) -> None:
    """Calls ``end`` in a thread when standard input ends: the parent process holds its other end."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # closed from the start: there is no parent
            while os.read(0, 4096):
                pass
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()
