"""Failures of operations and requests: which of them a worker survives, and whether another worker may succeed."""

from __future__ import annotations

from typing import Literal

import torch
from safetensors import SafetensorError

from rookery.errors import UserError
from rookery.worker.memory import NotOnThisWorker
from rookery.worker.transfer.http import CorruptDownload, TransferFailed, errno_of

SURVIVED = (UserError, OSError, MemoryError, SafetensorError, torch.OutOfMemoryError)
"""Errors after which a worker computes the operations of others: wrong files, and its disk or memory is full."""


class WorkerBroken(Exception):
    """This worker computes no more: it must start again."""


def failure_category(error: Exception) -> Literal["failed", "lost", "too small"]:
    """Of an operation or a request. Other than ``failed`` where the cause is this worker or its connection, so that
    another worker may succeed."""
    if isinstance(error, NotOnThisWorker):
        return "too small"
    if isinstance(error, TransferFailed):
        return "failed" if isinstance(error, CorruptDownload) else "lost"
    own = isinstance(error, OSError | MemoryError | torch.OutOfMemoryError | WorkerBroken) or errno_of(error) != 0
    return "lost" if own else "failed"
