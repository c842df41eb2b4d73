"""The device of a worker: its choice, its fused kernels and its memory.

Promise: nothing here touches a GPU unless the setting is ``cuda``, or ``auto`` and PyTorch sees one.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any, Literal, cast

import psutil
import torch

from rookery import machine
from rookery.errors import UserError


def choose(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this worker. Raises ``UserError`` for ``cuda`` if PyTorch sees no GPU."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("setting ROOKERY_DEVICE: given 'cuda', but PyTorch sees no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()) if available and wanted != "cpu" else torch.device("cpu")


@cache
def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has fused attention over sequences of different lengths there: FlashAttention-2 needs numbers of
    16 bits and compute capability 8.0."""
    eligible = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return eligible and torch.cuda.get_device_capability(device) >= (8, 0)


def finish(device: torch.device) -> None:
    """Waits until a GPU has computed all work submitted so far, so that its time counts for the submitter. A CPU
    computes synchronously."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On a GPU, a stream of the calling thread, separate from the default one."""
    if device.type == "cuda":
        return cast("contextlib.AbstractContextManager[Any]", torch.cuda.stream(torch.cuda.Stream(device)))
    return contextlib.nullcontext()


def used_bytes(device: torch.device) -> int:
    """Memory of this process on ``device``."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``; on a GPU also those that PyTorch keeps for itself."""
    if device.type != "cuda":
        return machine.memory().free
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
