"""Failures of operations and requests: which of them a worker survives, and whether another worker may succeed."""

from __future__ import annotations

from typing import Literal

import torch
from safetensors import SafetensorError

from rookery.errors import Unavailable, UserError
from rookery.worker.memory import NotOnThisWorker
from rookery.worker.transfer.http import CorruptDownload, TransferFailed, errno_of

SURVIVED = (UserError, OSError, MemoryError, SafetensorError, torch.OutOfMemoryError)
"""Errors after which a worker computes the operations of others: wrong files, and its disk or memory is full."""


class WorkerBroken(Exception):
    """This worker computes no more: it must start again."""


class PassingFault(Exception):
    """A fault that need not be the request's: a repetition may succeed. One that lasts ends the request."""


def failure_category(error: Exception) -> Literal["failed", "lost", "too small"]:
    """The category of the failure of an operation or a request. Other than ``failed`` where the cause is this worker or
    its connection, so that another worker may succeed."""
    if isinstance(error, NotOnThisWorker):
        return "too small"
    if isinstance(error, TransferFailed):
        return "failed" if isinstance(error, CorruptDownload) else "lost"
    if isinstance(error, Unavailable | PassingFault | OSError | MemoryError | torch.OutOfMemoryError | WorkerBroken):
        return "lost"
    return "lost" if errno_of(error) else "failed"
