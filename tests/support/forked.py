"""Processes that start in a moment: forked from one that has imported torch and the other libraries of a worker."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import BinaryIO

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["rookery.worker", "torch", "safetensors.torch", "tokenizers", "pydantic_settings", "jinja2", "httpx", "uvicorn"]
)  # rookery.worker is first and alone: it sets how torch's threads wait, and imports nothing


class ForkedProcess:
    """As much of :class:`subprocess.Popen` as tests use: runs ``code`` with these arguments and variables."""

    def __init__(self, code: str, arguments: list[str], environment: dict[str, str]) -> None:
        given, stdin = CONTEXT.Pipe(duplex=False)
        stderr, said = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(code, arguments, environment, given, said))
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
    os.dup2(given.fileno(), 0)
    os.dup2(said.fileno(), 2)
    given.close()
    said.close()
    sys.stdin, sys.stderr = os.fdopen(0, closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["-c", *arguments]
    os.environ.clear()
    os.environ.update(environment)
    exec(code, {"__name__": "__main__"})
