"""What a worker computes with, and how much room its caches get there.

Promise: nothing here touches a GPU unless ``cuda`` was asked for, or ``auto`` was and PyTorch sees one.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

from rookery.errors import UserError

CPU_CACHE_BYTES = 2 << 30
"""Attention caches on a CPU: enough for 64 texts of some thousand tokens of a 135M model."""

CACHE_SHARE = 0.5
"""Of a GPU's memory that is free once the base model is loaded, what attention caches get; the other half is for
adapters, training states, activations and logits."""


def choose(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this worker. Raises ``UserError`` where ``cuda`` is wanted and PyTorch sees none."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError("setting ROOKERY_DEVICE: given 'cuda', but PyTorch sees no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()) if there and wanted != "cpu" else torch.device("cpu")


@cache
def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has fused attention over sequences of unlike length there: FlashAttention-2 wants numbers of 16
    bits and compute capability 8.0."""
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def finish(device: torch.device) -> None:
    """Returns when all that a GPU was given so far is computed, so that its time is told of who gave it. A CPU
    computes while it is asked."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def cache_bytes(wanted: int, device: torch.device) -> int:
    """Room for attention caches: what is wanted, or (0) what suits the device as it is now."""
    if wanted:
        return wanted
    return int(CACHE_SHARE * free_bytes(device)) if device.type == "cuda" else CPU_CACHE_BYTES


def free_bytes(device: torch.device) -> int:
    """What PyTorch could still allocate on a GPU: the device's free memory and its own allocator's."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
