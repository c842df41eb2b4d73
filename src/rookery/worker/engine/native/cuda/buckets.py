"""Buckets: the shapes that decode steps are padded to, so that few CUDA graphs serve all of them.

Pure functions of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_KEYS = 1024
KEYS_STEP = 4
"""Key ranges are bounded by 1,024, 4,096, 16,384 …: the fused kernels read a range's real length, so that a loose bound
costs nothing, while every further bound is another graph."""


@dataclass(frozen=True)
class Bucket:
    """A decode step of ``rows`` rows over tails of at most ``keys`` tokens, shared prompts of at most ``prefix`` (0: no
    row has one), and ``adapters`` adapter slots (0: all rows use the base model)."""

    rows: int
    keys: int
    prefix: int
    adapters: int


def bucket(rows: int, keys: int, prefix: int, adapters: int) -> Bucket:
    """The smallest bucket that holds a step."""
    return Bucket(padded_rows(rows), padded_keys(keys), padded_keys(prefix) if prefix else 0, adapters)


def padded_rows(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 …: at most a third more than asked for."""
    size = 1
    while size < rows:
        if size % 2 == 0 and rows <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size


def padded_keys(keys: int) -> int:
    size = LEAST_KEYS
    while size < keys:
        size *= KEYS_STEP
    return size
