"""Whether processes run that others start and end."""

from __future__ import annotations

import psutil


def alive(process: psutil.Process) -> bool:
    """It runs, and has not just ended unheard: also where it ends between two looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def runs(pid: int) -> bool:
    """:func:`alive`, by number."""
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
