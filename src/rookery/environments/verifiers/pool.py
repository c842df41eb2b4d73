"""Judgements in processes of their own, with a time limit.

A reply can ask for what no machine finishes, and computing it may hold Python's lock: in the host's own process that
would stop every tenant's environments. Here it ends one process, which costs a fork.

A child runs a module that imports its library once and forks the one that judges (:func:`serve`): one line of JSON at a
time, each with its limit. When a judgement outlasts it, the child answers for it and forks another; what a judgement
raises is its answer. A few children work side by side, so that honest replies pass the others; one that nobody needs is
ended. All end when their parent is gone. None has the service's variables, and none writes a file while it judges.
Needs POSIX.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rookery.errors import short

LIMIT_SECONDS = 5.0
"""Of processor time, so that a busy machine makes no reply wrong, for one judgement: honest ones take milliseconds, an
integral that has a closed form one to five seconds on a slow machine."""

SIDE_BY_SIDE = 4
"""Children of one job at most, each a Python with its library. On as many processors, of a job's 64 calls under way 44
may run away before an honest reply behind them is later than the usual ``step_timeout`` of a minute."""

IDLE_SECONDS = 60.0
"""A child that was asked nothing for so long is ended: its job is over, or it was one of many for a moment."""


class VerifierTimeout(Exception):
    """A judgement outlasted its limit."""


class VerifierError(RuntimeError):
    """What a judgement raised, in one line."""


class VerifierPool:
    """Children that run ``module``, which calls :func:`serve`. Thread-safe; :data:`SIDE_BY_SIDE` judgements at a time.

    ``limit`` is of processor time for one. The module finds its ``arguments`` in ``sys.argv[2:]``.
    """

    def __init__(self, module: str, *arguments: str, limit: float = LIMIT_SECONDS) -> None:
        self._command = ["-m", module, str(limit), *arguments]
        self._places = threading.BoundedSemaphore(SIDE_BY_SIDE)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        """The one used last comes last, and is used next: those beyond what is needed fall idle."""
        self._watched = False
        """A timer will look at who is idle."""

    def ask(self, question: Mapping[str, Any]) -> Any:
        """What the judge answers. Raises :class:`Late`, :class:`Raised`, and RuntimeError where the child has ended."""
        with self._places:
            child = self._take()
            answer = child.ask(question)
            self._put(child)  # one that raised is not used again, and ended with its last reference
        if "late" in answer:
            raise VerifierTimeout(f"not done within {answer['late']:g} s of processor time")
        if "raised" in answer:
            raise VerifierError(answer["raised"])
        return answer["judged"]

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive():
                    return child
        return _Child(self._command)

    def _put(self, child: _Child) -> None:
        with self._lock:
            self._idle.append(child)
            if not self._watched:
                self._watch()

    def _watch(self) -> None:
        timer = threading.Timer(IDLE_SECONDS, self._end_idle)
        timer.daemon = True
        timer.start()
        self._watched = True

    def _end_idle(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        with self._lock:
            over = [child for child in self._idle if child.used <= oldest]
            self._idle = [child for child in self._idle if child.used > oldest]
            self._watched = False
            if self._idle:
                self._watch()
        for child in over:  # nobody else has them any more
            child.end()


class _Child:
    """A process that imported its library and the one that it forked, a group of their own."""

    def __init__(self, command: list[str]) -> None:
        self._module = command[1]
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")},
        )
        self._kill = weakref.finalize(self, _kill, self._process)
        self.used = time.monotonic()

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps(question)
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            ended = self._process.wait()
            raise RuntimeError(f"the process of {self._module} ended with {ended}; its standard error says why")
        self.used = time.monotonic()
        said: dict[str, Any] = json.loads(answer)
        return said

    def end(self) -> None:
        """While it is idle: both see that there is nothing more to read, the forked one first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._kill()


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # they ended just now
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a line that was never read is still in the buffer
                pipe.close()


def serve(prepare: Callable[[], Callable[..., Any]], *, opens_nothing: bool = False) -> None:
    """The child's side: reads each question from standard input and answers what the judge says of its fields.

    ``prepare`` gives the judge; what it has imported, built and used is there in every fork. ``opens_nothing``: judging
    then imports nothing and needs no file and no thread, so that the fork may be denied them.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whose parent is gone has nobody to tell
    limit = float(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what a library prints is no answer
    judge = prepare()
    while forked := os.fork():
        _, status = os.waitpid(forked, 0)
        ended = os.waitstatus_to_exitcode(status)
        if ended != -signal.SIGPROF:
            sys.exit(f"the process that judges ended with {ended}" if ended else 0)
        print(json.dumps({"late": limit}), file=answers, flush=True)
    _confine(opens_nothing)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit)  # nobody handles its signal: it ends this process at once
        try:
            answer = {"judged": judge(**json.loads(line))}
        except BaseException as error:  # a library's exit() too
            answer = {"raised": short(" ".join(f"{type(error).__name__}: {error}".split()))}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


def _confine(opens_nothing: bool) -> None:
    """What is open stays so. For good; a superuser's processes may be forked all the same."""
    import resource  # POSIX has it

    denied = [resource.RLIMIT_FSIZE]
    if opens_nothing:
        denied += [resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC]
    for what in denied:
        resource.setrlimit(what, (0, 0))
