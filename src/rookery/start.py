"""The entry of the command ``rookery`` and of a worker: a signal that comes while they import ends them at once.

Imports take seconds. Until a program sets its own handlers, Ctrl-C would print a traceback, and SIGTERM would be lost
where the program is process 1, as in a container: Linux ignores there what has no handler.

A command that has ended does not wait long for its threads: one may hang in a request to a server that is silent.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from types import FrameType

THREADS_SECONDS = 5.0
"""Longest wait of a command that has ended for its threads."""


def main() -> None:
    """The command line."""
    _end_on_signals()
    from rookery.cli import main as run_command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        run_command()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        timer = threading.Timer(THREADS_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":  # python -m rookery.start MODULE ARGUMENTS
    _end_on_signals()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
