"""The few rules that make a token's result on CPU independent of what else is in the batch.

A row of a matrix product must depend on that row alone, and zeros appended to the contraction must change nothing. In
bfloat16 all products go through oneDNN, whose kernels add along the contraction in one fixed order. In float32 only the
base model's projections do (``model/projection.py``); the others go through PyTorch's BLAS, whose kernels take rows
by the block. What would break it, and every product of the engine is shaped to avoid:

* bfloat16: a lone row is multiplied by another kernel → at least two rows;
* bfloat16: a product of at most ``_SMALL`` multiplications does not go to oneDNN at all → enough rows;
* float32: rows that are left over, less than a block of them, are added up in another order where a thread has no
  others → whole blocks;
* float32: a contraction is cut into pieces, and where depends on its length → ``exact_capacity`` and
  ``alone_in`` keep to lengths that are cut alike;
* a softmax adds lane by lane, so a key must keep its lane → key ranges begin and end at multiples of ``LANES``.

Tests check the rules, bit for bit, on random models and on SmolLM2, in the type that the machine's workers compute in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 32
"""Keys per vector register: 512 bits of bfloat16, a multiple of every narrower register's count."""

_SMALL = 16 * 16 * 16
"""PyTorch hands a bfloat16 product to oneDNN only above this many multiplications."""

_BLOCK = 4
"""Rows that MKL's float32 kernels take at a time: products of any multiple of it gave the same rows with one to eight
threads, while of 97 rows among eight threads one stood alone."""

_DEPTH = 192
"""What MKL's float32 kernels add up in one piece. A contraction of less than two such pieces is cut in the middle, a
longer one after every piece."""


def exact_rows(dtype: torch.dtype, rows: int, *products: tuple[int, int]) -> int:
    """With how many rows, at least ``rows``, every product [rows, inner] x [inner, outer] is exact; ``products`` are
    (inner, outer). Other types have no rule."""
    if dtype == torch.float32:
        return -(-rows // _BLOCK) * _BLOCK
    if dtype == torch.bfloat16:
        return max(rows, 2, *(_SMALL // (inner * outer) + 1 for inner, outer in products))
    return rows


def with_rows(x: Tensor, rows: int) -> Tensor:
    """x [..., n, size] with zeros appended → [..., rows, size]; ``x`` itself where it has them."""
    return x if x.shape[-2] == rows else F.pad(x, (0, 0, 0, rows - x.shape[-2]))


def alone_in(dtype: torch.dtype, inner: int) -> bool:
    """Whether a few numbers in a row, zeros before and behind them, are added in a contraction of ``inner`` as they
    are by themselves, wherever they stand."""
    return dtype != torch.float32 or inner <= _DEPTH


def capacity(length: int) -> int:
    """Room for ``length`` keys: multiples of ``LANES``, about a third apart (32, 64, 96, 128, 192, 256, 384 …), so
    that a growing sequence moves seldom and wastes little."""
    size = LANES
    while length > size:
        if size % (2 * LANES) == 0 and length <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size


def exact_capacity(dtype: torch.dtype, length: int) -> int:
    """The same without those at which a contraction over the keys is cut where that of another capacity is not."""
    size = capacity(length)
    return 2 * _DEPTH if dtype == torch.float32 and _DEPTH < size < 2 * _DEPTH else size
