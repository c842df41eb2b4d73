"""Processes that start in a moment: forked from one that has imported torch and the other libraries of a worker."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from rookery.children import child_variables
from rookery.cluster.supervisor import Child

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "rookery.worker",
        "rookery.worker.process",
        "safetensors.torch",
        "tokenizers",
        "jinja2",
        "httpx",
        "numba",
        "rookery.environments.host",
        "uvicorn",
        "tests.support.loaded_kernels",
    ]
)  # rookery.worker is first and alone: it sets how torch's threads wait, and imports nothing

_starting = threading.Lock()
"""Within, one thread starts a process or takes an exit code: :mod:`multiprocessing` looks at all processes of the
program when it starts one."""


class ForkedProcess:
    """As much of :class:`subprocess.Popen` as tests use: runs ``code`` with these arguments and variables."""

    def __init__(self, code: str, arguments: list[str], environment: dict[str, str]) -> None:
        given, stdin = CONTEXT.Pipe(duplex=False)
        stderr, said = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(code, arguments, environment, given, said))
        with _starting:
            self._process.start()
        given.close()
        said.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin: BinaryIO = os.fdopen(os.dup(stdin.fileno()), "wb")
        stdin.close()
        self._said = b""
        self._reader = threading.Thread(target=self._read, args=(stderr,))
        self._reader.start()

    def _read(self, stderr: Connection) -> None:
        with os.fdopen(os.dup(stderr.fileno()), "rb") as file:
            stderr.close()
            self._said = file.read()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, bytes]:
        self.stdin.close()
        self.wait(timeout)
        self._reader.join()
        return None, self._said

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(code: str, arguments: list[str], environment: dict[str, str], given: Connection, said: Connection) -> None:
    os.dup2(said.fileno(), 2)
    said.close()
    _become(["-c", *arguments], environment, given)
    exec(code, {"__name__": "__main__"})


def _become(arguments: list[str], environment: dict[str, str], given: Connection) -> None:
    """This process reads from ``given``, and has these arguments and variables. Its standard error is set already."""
    os.dup2(given.fileno(), 0)
    given.close()
    sys.stdin, sys.stderr = os.fdopen(0, closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = list(arguments)
    os.environ.clear()
    os.environ.update(environment)


class _ForkedChild:
    """A child of a service's supervisor."""

    def __init__(self, child: Child, path: Path) -> None:
        given, self._stdin = CONTEXT.Pipe(duplex=False)
        variables = child_variables(child.environment)
        self._process = CONTEXT.Process(target=_run_module, args=(child.arguments, variables, given, str(path)))
        with _starting:
            self._process.start()
        given.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
            self._stdin.close()
        with _starting:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


async def spawn_forked(child: Child, path: Path) -> _ForkedChild:
    """Starts a child as :func:`~rookery.cluster.supervisor.spawn_process` does, without the seconds in which an
    interpreter imports torch and the libraries of a host. A library that is preloaded by the linker is not there."""
    return await asyncio.to_thread(_ForkedChild, child, path)


def _run_module(arguments: list[str], environment: dict[str, str], given: Connection, log: str) -> None:
    os.setsid()
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    _become(arguments, environment, given)
    sys.modules.pop(arguments[0], None)  # it may be imported already, and runs as the program here
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
