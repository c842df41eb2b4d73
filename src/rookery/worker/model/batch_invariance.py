"""Batch invariance on CPU: a token's result does not depend on which other tokens are in its batch.

As in the field's use of the term, a kernel is batch-invariant if a row's result is the same bits for any number of
other rows of its batch. A matrix product is not by itself: the number of rows decides which kernel runs and in which
order it adds. Here zeros appended to the contraction must not change the result either. In bfloat16 all products go
through oneDNN, whose kernels, except those named below, add along the contraction in one fixed order. In float32 only
the base model's linear layers do (``layers``); the others go through PyTorch's BLAS, whose kernels take rows by the
block, on Intel's processors only in reproducible mode (``worker/__init__.py``). The engine shapes every product to
avoid the exceptions:

* bfloat16: a lone row is multiplied by another kernel → at least two rows;
* bfloat16: a product of at most ``_SMALL`` multiplications does not go to oneDNN → enough rows;
* bfloat16 with tile instructions (AMX): a contraction longer than ``TILE_DEPTH`` is added in an order that depends on
  rows, columns and threads. With many columns the order is the same up to ``TILE_ROWS`` rows → blocks of rows
  (``layers.PackedLinear``); with few columns it is not → chunks of the contraction (``contraction_chunks``);
* the same: a contraction of less than 32 uses another kernel where a thread has one row → rows for all threads;
* float32: rows beyond the last whole block are added in another order where a thread has no others → whole blocks;
* float32: a contraction is split at places that depend on its length → ``exact_key_capacity`` keeps
  to lengths that are split alike;
* a softmax adds lane by lane, so a key must keep its lane → key ranges start and end at multiples of ``LANES``.

Tests check the rules, bit for bit, on random models and on SmolLM2, in the type that the machine's workers compute in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache

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

_DEPTHS = (192, 384)
"""The lengths that MKL's float32 kernels add up in one piece, the second with AVX-512. A contraction of less than two
such pieces is cut in the middle, a longer one after every piece."""

TILE_ROWS = 32
"""Two tiles: up to so many rows oneDNN's kernels for tiles add up a long contraction in one order, by any number of
threads up to ``_TILE_THREADS`` and with at least ``_TILE_COLUMNS`` for each (14 shapes of models, 2 to 64 rows, 1 to 8
threads; 33 rows are added up in another)."""

TILE_DEPTH = 384
"""A contraction up to this long has one order with any rows, columns, batches and threads; one of 512 has several."""

_TILE_THREADS, _TILE_COLUMNS = 8, 64
"""With 16 threads a product of 2 to 32 rows had several orders, as had 128 columns by 3 threads, and 320 by 8."""

_TILE_THIN, _TILE_FEW = 32, 4
"""A contraction shorter than the first wants at least so many rows, and two for each thread."""

CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variable that limits the instructions of oneDNN, and its older name."""


def has_tiles() -> bool:
    """Whether the processor has tile instructions."""
    return torch.cpu._is_amx_tile_supported()


def disable_amx_if_unsafe(
    threads: int,
    base: Iterable[tuple[int, int]],
    ranks: int,
    environment: MutableMapping[str, str] = os.environ,
    tiles: Callable[[], bool] = has_tiles,
) -> bool:
    """oneDNN shall not use tile instructions where products by them would not be exact: by so many ``threads``, with
    the ``base``'s projections (inputs, outputs), and ``ranks`` of an adapter in one product. Whether that is so
    here; a limit that the ``environment`` has stays. For processes that have not multiplied yet."""
    columns = [outputs for inputs, outputs in base if inputs > TILE_DEPTH]
    wide = not columns or (threads <= _TILE_THREADS and min(columns) >= _TILE_COLUMNS * threads)
    if (wide and ranks <= TILE_DEPTH) or not tiles():
        return False
    if any(environment.get(name) for name in CAPS):
        return False
    environment[CAPS[0]] = "AVX512_CORE_BF16"
    return True


def amx_enabled(environment: Mapping[str, str], tiles: Callable[[], bool] = has_tiles) -> bool:
    """Whether oneDNN uses tile instructions: the processor has them, and the ``environment`` lets it."""
    cap = next((value.upper() for name in CAPS if (value := environment.get(name))), "ALL")
    return tiles() and (cap in ("ALL", "DEFAULT") or "AMX" in cap)


@cache
def _amx_enabled_here() -> bool:
    return amx_enabled(os.environ)


def uses_amx(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether products go by tile instructions."""
    return dtype == torch.bfloat16 and torch.device(device).type == "cpu" and _amx_enabled_here()


def contraction_chunks(depth: int, dtype: torch.dtype, device: torch.device | str) -> list[int]:
    """The pieces in which a contraction of this depth is exact, in order. The first ones do not depend on how many
    follow, so zeros behind a contraction change nothing."""
    if depth <= TILE_DEPTH or not uses_amx(dtype, device):
        return [depth]
    rest = depth % TILE_DEPTH
    return [TILE_DEPTH] * (depth // TILE_DEPTH) + [rest] * (rest > 0)


def chunked_matmul(x: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """x [..., rows, depth] · w [..., depth, out], for ``w`` in the chunks of ``contraction_chunks``; several add up in
    float32."""
    if len(pieces) == 1:
        return x @ pieces[0]
    first, *others = x.split([piece.shape[-2] for piece in pieces], -1)
    sums = (first @ pieces[0]).float()
    for part, piece in zip(others, pieces[1:], strict=True):
        sums += part @ piece
    return sums.to(x.dtype)


def exact_rows(dtype: torch.dtype, rows: int, *products: tuple[int, int]) -> int:
    """The number of rows, at least ``rows``, with which every product [rows, inner] x [inner, outer] is exact;
    ``products`` are (inner, outer). Other types have no rule."""
    if dtype == torch.float32:
        return -(-rows // _BLOCK) * _BLOCK
    if dtype == torch.bfloat16:
        if _amx_enabled_here() and any(inner < _TILE_THIN for inner, _ in products):
            rows = max(rows, _TILE_FEW, 2 * torch.get_num_threads())
        return max(rows, 2, *(_SMALL // (inner * outer) + 1 for inner, outer in products))
    return rows


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [..., n, size] with zeros appended → [..., rows, size]; ``x`` itself where it has them."""
    return x if x.shape[-2] == rows else F.pad(x, (0, 0, 0, rows - x.shape[-2]))


def key_capacity(length: int) -> int:
    """Room for ``length`` keys: multiples of ``LANES``, about a third apart (32, 64, 96, 128, 192, 256, 384 …), so
    that a growing sequence moves seldom and wastes little."""
    size = LANES
    while length > size:
        if size % (2 * LANES) == 0 and length <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size


def exact_key_capacity(dtype: torch.dtype, length: int) -> int:
    """The capacity of :func:`key_capacity`, without those at which a contraction over the keys is cut where that of
    another capacity is not."""
    size = key_capacity(length)
    for depth in _DEPTHS if dtype == torch.float32 else ():
        if depth < size < 2 * depth:
            return 2 * depth
    return size
