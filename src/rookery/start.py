"""The entry of the command ``rookery`` and of a worker: a signal that comes while they import ends them at once.

Imports take seconds. Until a program sets its own handlers, Ctrl-C would print a traceback.

In a container the first process is process 1, with two tasks of an init. Every process whose parent has ended becomes
its child, such as one from a killed sandbox, and stays as a zombie until somebody waits for it: thousands of them fill
the container's limit of processes. And Linux ignores each signal for which it has no handler. So process 1 starts the
program as its child, passes signals on to it, waits for whatever ends, and ends as the program does.

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


PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that process 1 passes on to the program."""

FROM_KERNEL = 0x80
"""``si_code`` of a signal that the kernel sent by itself: that of Ctrl-C at a terminal, which the program gets, too."""


def main() -> None:
    """The command line."""
    _start()
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


def _start() -> None:
    """Undo settings of a parent process: with SIGCHLD ignored the exit codes of children are lost, and blocked signals
    never arrive."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    if os.getpid() == 1:
        _wait_for_all()
    _end_on_signals()


def _wait_for_all() -> None:
    """Returns in a child process, which becomes the program; this one is its init."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *PASSED_ON})
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):  # the program has not ended: there is a child
            if ended[0] == program:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)
        came = signal.sigwaitinfo({signal.SIGCHLD, *PASSED_ON})
        if came.si_signo != signal.SIGCHLD and came.si_code != FROM_KERNEL:
            os.kill(program, came.si_signo)


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":  # python -m rookery.start MODULE ARGUMENTS
    _start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
