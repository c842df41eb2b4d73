"""The few rules that make a token's bfloat16 result on CPU independent of what else is in the batch.

Matrix products in bfloat16 go through oneDNN, whose kernels add along the contraction in one fixed order, so a row of
a product depends on that row alone and zeros appended to the contraction change nothing. Three things would break it,
and every product of the engine is shaped to avoid them:

* a lone row is multiplied by another kernel → at least two rows;
* a product of at most ``_SMALL`` multiplications does not go to oneDNN at all → ``least_rows``;
* a softmax adds lane by lane, so a key must keep its lane → key ranges begin and end at multiples of ``LANES``.

Tests check the rules, bit for bit, on random models and on SmolLM2.
"""

from __future__ import annotations

LANES = 32
"""Keys per vector register: 512 bits of bfloat16, a multiple of every narrower register's count."""

_SMALL = 16 * 16 * 16
"""PyTorch hands a bfloat16 product to oneDNN only above this many multiplications."""


def least_rows(*products: tuple[int, int]) -> int:
    """The smallest number of rows with which every product [rows, inner] x [inner, outer] is computed by oneDNN;
    ``products`` are (inner, outer)."""
    return max(2, *(_SMALL // (inner * outer) + 1 for inner, outer in products))


def capacity(length: int) -> int:
    """Room for ``length`` keys: multiples of ``LANES``, about a third apart (32, 64, 96, 128, 192, 256, 384 …), so
    that a growing sequence moves seldom and wastes little."""
    size = LANES
    while length > size:
        if size % (2 * LANES) == 0 and length <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size
