"""A layer's work between its linear products and its attention, as one kernel: LoRA, residual, RMSNorm and SwiGLU.

Promises:

* A row's result is the same bits in any batch: blocks hold rows of one adapter, and each number of LoRA's two factors
  is one chain of fused multiply-adds along its contraction (``multiply``), whatever the block's size. A NaN stays
  in its adapter's rows.
* Numbers are rounded to the base's dtype where the decoder's plain operations round them; all else is float32. The sum
  of squares of a norm is taken lane by lane along the row, then over the lanes.
* Ranks are padded with zeros to a multiple of 16; an adapter without a site costs nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.kernels.product import multiply
from rookery.worker.engine.native.kernels.runtime import FIRST, Arguments, Kernel, check_rows, checked_address
from rookery.worker.engine.native.kernels.vec import (
    LANES,
    device_function,
    exp,
    fetch_increment,
    load,
    load_float,
    read_float,
    read_int,
    rounded,
    splat,
    store,
    store_float,
    sum_lanes,
)
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import Decoder, output_slices

BLOCK_ROWS = 8
"""Most rows of a block: as many as a product holds in registers. Fewer where threads would have no block."""

_COLUMNS = 16 * LANES
"""Columns that a block computes at a time, so that they stay in the first cache."""

_EXPAND, _SHRINK, _NORM, _SWIGLU = range(4)
"""The stages: expand of y in place; shrink of x; y added to the residual stream, norm and shrink; SwiGLU and shrink."""

(_BLOCKS, _NUM_BLOCKS, _HALF, _RESIDUAL, _STRIDE, _SCRATCH, _ROOM, _EPS, _STAGE, _UP, _DOWN, _PARTS, _END_0, _END_1,
 _END_2, _WEIGHT, _INNER, _NEXT_INNER, _OUT, _Y) = range(FIRST, FIRST + 20)  # fmt: skip
"""``_BLOCKS`` [blocks, 4]: first row, rows, padded rank, address of the adapter's table (0: the base model). From
``_STAGE`` on, a stage's: places of B and A in that table (0: none), parts of the shrink, ends of y's parts, weight of
the norm, LoRA's middle [rows, ``_STRIDE``] float32 to expand and to write, output, y (0: none)."""


@dataclass(frozen=True)
class KernelAdapter:
    """One adapter as the kernel reads it: for each layer and site A [parts · rank / 16, in, 16] and B [out / 16, rank,
    16], and ``table`` [layers, sites, 2] of their addresses, A first; 0 where the adapter has no such site."""

    rank: int
    table: Tensor
    factors: list[Tensor]

    @cached_property
    def bytes(self) -> int:
        return sum(factor.nbytes for factor in self.factors)

    @classmethod
    def pack(
        cls, rank: int, a: dict[tuple[int, str], Tensor], b: dict[tuple[int, str], Tensor], layers: int
    ) -> KernelAdapter:
        """Copies the factors into the kernel's layout. ``a[layer, site]`` [parts · rank, in] and ``b[layer, site]``
        [out, rank] are those of a resident adapter."""
        table, factors = torch.zeros(layers, len(SITES), 2, dtype=torch.int64), []
        for (layer, site), down in a.items():
            for i, factor in enumerate((down, b[layer, site])):
                factors.append(factor.view(-1, LANES, factor.shape[1]).transpose(1, 2).contiguous())
                table[layer, list(SITES).index(site), i] = factors[-1].data_ptr()
        return cls(rank, table, factors)


@device_function
def _expand(args: int, block: int, part: int, at: int, columns: int, out: int, stride: int) -> None:
    """Adds B · middle to the ``columns`` of ``out`` [rows, stride] float32, which are y's from ``at`` on and belong to
    the ``part``-th part."""
    rank, table, half = read_int(block, 2), read_int(block, 3), read_int(args, _HALF)
    b = read_int(table, read_int(args, _UP)) if table and read_int(args, _UP) else 0
    if b:
        inner = read_int(args, _INNER) + 4 * (read_int(block, 0) * read_int(args, _STRIDE) + part * rank)
        b += (2 if half else 4) * at * rank
        rows, vectors = read_int(block, 1), columns // LANES
        multiply(inner, read_int(args, _STRIDE), rows, b, LANES, LANES * rank, rank, out, stride, vectors, half)


@device_function
def _next_inner(args: int, block: int) -> int:
    """The middle that the block's rows write."""
    return read_int(args, _NEXT_INNER) + 4 * read_int(block, 0) * read_int(args, _STRIDE)


@device_function
def _set_inner(args: int, block: int, final: int) -> None:
    """Sets the block's middle to zero; if ``final``, rounds it instead."""
    inner, stride, half = _next_inner(args, block), read_int(args, _STRIDE), read_int(args, _HALF)
    for row in range(read_int(block, 1)):
        for i in range(0, read_int(args, _PARTS) * read_int(block, 2), LANES):
            value = rounded(load_float(inner, row * stride + i), half) if final else splat(0.0)
            store_float(inner, row * stride + i, value)


@device_function
def _shrink(args: int, block: int, x: int, stride: int, at: int, columns: int, width: int) -> None:
    """Adds A · x of ``columns`` columns from ``at`` on, of ``width`` in all, to the middle; ``x`` [rows, stride]
    float32 begins with the first of them."""
    rank, table, half = read_int(block, 2), read_int(block, 3), read_int(args, _HALF)
    a = read_int(table, read_int(args, _DOWN) - 1) if table and read_int(args, _DOWN) else 0
    if a:
        a += (2 if half else 4) * at * LANES
        rows, vectors = read_int(block, 1), read_int(args, _PARTS) * rank // LANES
        out, out_stride = _next_inner(args, block), read_int(args, _STRIDE)
        multiply(x, stride, rows, a, LANES, LANES * width, columns, out, out_stride, vectors, half)


@device_function
def _load_rows(args: int, block: int, source: int, at: int, width: int, columns: int, out: int, stride: int) -> None:
    """The block's rows of ``source`` [tokens, width], columns from ``at`` on, to ``out`` [rows, stride] float32."""
    first, half = read_int(block, 0), read_int(args, _HALF)
    for row in range(read_int(block, 1)):
        for i in range(0, columns, LANES):
            store_float(out, row * stride + i, load(source, (first + row) * width + at + i, half))


@device_function
def _store_rows(args: int, block: int, x: int, stride: int, columns: int, out: int, width: int, at: int) -> None:
    """The reverse of ``_load_rows``."""
    first, half = read_int(block, 0), read_int(args, _HALF)
    for row in range(read_int(block, 1)):
        for i in range(0, columns, LANES):
            store(out, (first + row) * width + at + i, load_float(x, row * stride + i), half)


@device_function
def _expand_block(args: int, block: int, scratch: int) -> None:
    """y += B · middle, part by part."""
    y, width, begin = read_int(args, _Y), read_int(args, _END_2), 0
    for part in range(3):
        end = read_int(args, _END_0 + part)
        for at in range(begin, end, _COLUMNS):
            columns = min(_COLUMNS, end - at)
            _load_rows(args, block, y, at, width, columns, scratch, _COLUMNS)
            _expand(args, block, part, at, columns, scratch, _COLUMNS)
            _store_rows(args, block, scratch, _COLUMNS, columns, y, width, at)
        begin = end


@device_function
def _shrink_block(args: int, block: int, scratch: int) -> None:
    """middle = A · y."""
    width = read_int(args, _END_0)
    for at in range(0, width, _COLUMNS):
        columns = min(_COLUMNS, width - at)
        _load_rows(args, block, read_int(args, _Y), at, width, columns, scratch, _COLUMNS)
        _shrink(args, block, scratch, _COLUMNS, at, columns, width)


@device_function
def _norm_block(args: int, block: int, scratch: int) -> None:
    """residual += y + B · middle; out = norm(residual) · weight; middle = A · out."""
    width, half, y = read_int(args, _END_0), read_int(args, _HALF), read_int(args, _Y)
    residual, weight = read_int(args, _RESIDUAL), read_int(args, _WEIGHT)
    if y:
        _load_rows(args, block, y, 0, width, width, scratch, width)
        _expand(args, block, 0, 0, width, scratch, width)
    for row in range(read_int(block, 1)):
        at, to = (read_int(block, 0) + row) * width, row * width
        squares = splat(0.0)
        for i in range(0, width, LANES):
            x = load(residual, at + i, half)
            if y:
                x = rounded(x + rounded(load_float(scratch, to + i), half), half)
                store(residual, at + i, x, half)
            store_float(scratch, to + i, x)
            squares = squares + x * x
        mean = sum_lanes(squares) / np.float32(width)
        factor = splat(np.float32(1.0) / math.sqrt(mean + read_float(read_int(args, _EPS), 0)))
        for i in range(0, width, LANES):
            x = load_float(scratch, to + i) * factor * load(weight, i, half)
            store_float(scratch, to + i, rounded(x, half))
    _store_rows(args, block, scratch, width, width, read_int(args, _OUT), width, 0)
    _shrink(args, block, scratch, width, 0, width, width)


@device_function
def _swiglu_block(args: int, block: int, scratch: int) -> None:
    """[gate, up] = y + B · middle; out = silu(gate) · up; middle = A · out."""
    width, half, y = read_int(args, _END_0), read_int(args, _HALF), read_int(args, _Y)
    one = splat(1.0)
    for at in range(0, width, _COLUMNS):
        columns = min(_COLUMNS, width - at)
        for part in range(2):
            here = scratch + 4 * part * _COLUMNS
            _load_rows(args, block, y, part * width + at, 2 * width, columns, here, 2 * _COLUMNS)
            _expand(args, block, part, part * width + at, columns, here, 2 * _COLUMNS)
        for row in range(read_int(block, 1)):
            for i in range(0, columns, LANES):
                to = 2 * row * _COLUMNS + i
                gate, up = load_float(scratch, to), load_float(scratch, to + _COLUMNS)
                gate = rounded(gate, half)
                gate = rounded(gate / (one + exp(splat(0.0) - gate)), half)
                store_float(scratch, to, rounded(gate * rounded(up, half), half))
        _store_rows(args, block, scratch, 2 * _COLUMNS, columns, read_int(args, _OUT), width, at)
        _shrink(args, block, scratch, 2 * _COLUMNS, at, columns, width)


def _stage(args: int) -> None:
    stage = read_int(args, _STAGE)
    scratch = read_int(args, _SCRATCH) + 4 * read_int(args, _ROOM) * fetch_increment(args, 1)
    while True:
        index = fetch_increment(args, 0)
        if index >= read_int(args, _NUM_BLOCKS):
            break
        block = read_int(args, _BLOCKS) + 32 * index
        shrinks = read_int(block, 3) != 0 and read_int(args, _DOWN) != 0
        if shrinks:
            _set_inner(args, block, 0)
        if stage == _EXPAND:
            _expand_block(args, block, scratch)
        elif stage == _SHRINK:
            _shrink_block(args, block, scratch)
        elif stage == _NORM:
            _norm_block(args, block, scratch)
        else:
            _swiglu_block(args, block, scratch)
        if shrinks:
            _set_inner(args, block, 1)


KERNEL = Kernel(_stage)

LayerSite = tuple[int, str]
"""A layer and a key of ``SITES``."""


class LayerStages:
    """The stages of one slice of tokens, in the order in which ``layer_pass.run_layer`` calls them. Each one writes the
    next site's LoRA middle ``inner`` [tokens, at least parts · rank] float32, which the stage behind that site's
    product reads. Widths must be multiples of 16."""

    def __init__(self, decoder: Decoder, residual: Tensor, groups: Sequence[tuple[KernelAdapter | None, int]]) -> None:
        """``residual`` [tokens, hidden] is changed in place; ``groups`` are adapters (None: the base model) with their
        numbers of consecutive tokens. Raises ``ValueError`` if they are not as many as ``residual`` has."""
        config, self._dtype = decoder.config, residual.dtype
        self.decoder, self.residual, self._tokens = decoder, residual, len(residual)
        self._adapted = any(adapter is not None for adapter, _ in groups)
        threads = torch.get_num_threads()
        blocks = np.array(list(_blocks(groups, self._tokens, config.layers, threads)), dtype=np.int64)
        stride = max((3 * adapter.rank for adapter, _ in groups if adapter is not None), default=0)
        self.inner = torch.empty(self._tokens, stride)
        self._widths = {site: _widths(config, site) for site in SITES}
        self._keep = groups
        room = BLOCK_ROWS * max(config.hidden, 2 * _COLUMNS)
        arguments = self._arguments = Arguments()
        arguments.tensor(torch.from_numpy(blocks), torch.int64, len(blocks), 4).number(len(blocks))
        arguments.number(self._dtype == torch.bfloat16).tensor(residual, self._dtype, self._tokens, config.hidden)
        arguments.number(stride).tensor(torch.empty(arguments.threads, room), torch.float32, arguments.threads, room)
        arguments.number(room).tensor(torch.tensor([config.eps]), torch.float32, 1)

    def norm(self, weight: Tensor, y: Tensor | None, up: LayerSite | None, down: LayerSite | None) -> Tensor:
        """Adds y and the delta of its site ``up`` to the residual stream → its norm, for the site ``down``."""
        out = torch.empty_like(self.residual)
        self._run(_NORM, up, down, self._widths["qkv"][0], y, weight, out)
        return out

    def expand(self, site: LayerSite, y: Tensor) -> Tensor:
        """y plus the delta of its site, in place."""
        if self._adapted:
            self._run(_EXPAND, site, None, self._widths[site[1]][1], y)
        return y

    def shrink(self, site: LayerSite, x: Tensor) -> Tensor:
        """x itself, the input of ``site``."""
        if self._adapted:
            self._run(_SHRINK, None, site, self._widths[site[1]][0], x)
        return x

    def swiglu(self, y: Tensor, up: LayerSite | None, down: LayerSite) -> Tensor:
        """SwiGLU of y = [gate, up] and the delta of its site ``up``, for the site ``down``."""
        out = torch.empty(self._tokens, self.decoder.config.inner, dtype=self._dtype)
        self._run(_SWIGLU, up, down, self._widths["down"][0], y, None, out)
        return out

    def _run(
        self,
        stage: int,
        up: LayerSite | None,
        down: LayerSite | None,
        ends: tuple[int, int, int],
        y: Tensor | None,
        weight: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """``ends`` of y's parts."""
        inner = torch.empty_like(self.inner) if self._adapted and down is not None else self.inner
        hidden, width = self.residual.shape[1], ends[2] * (2 if stage == _SWIGLU else 1)
        self._arguments.replace(
            _STAGE,
            stage,
            _SITE_FIELDS[up[1]] + 2 * len(SITES) * up[0] + 1 if up is not None and self._adapted else 0,
            _SITE_FIELDS[down[1]] + 2 * len(SITES) * down[0] + 1 if down is not None and self._adapted else 0,
            len(SITES[down[1]]) if down is not None else 0,
            *ends,
            checked_address(weight, self._dtype, (hidden,)) if weight is not None else 0,
            self.inner.data_ptr(),
            inner.data_ptr(),
            out.data_ptr() if out is not None else 0,
            checked_address(y, self._dtype, (self._tokens, width)) if y is not None else 0,
        )
        KERNEL(self._arguments)
        if down is not None:
            self.inner = inner


_SITE_FIELDS = {site: 2 * i for i, site in enumerate(SITES)}
"""Of a site's A in a layer's part of an adapter's table; B's is the next."""


def _widths(config: DecoderConfig, site: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """``_END_0`` to ``_END_2`` of a site's input, and of its output, which has up to three parts."""
    ends = [part.stop for part in output_slices(config, site).values()]
    width = config.site_shape(SITES[site][0])[0]
    return (width, width, width), (ends[0], ends[min(1, len(ends) - 1)], ends[-1])


def _blocks(
    groups: Sequence[tuple[KernelAdapter | None, int]], tokens: int, layers: int, threads: int
) -> Iterator[tuple[int, int, int, int]]:
    """``_BLOCKS`` of the groups: at least one for each thread, where each has two tokens."""
    first, most = 0, min(BLOCK_ROWS, max(2, tokens // threads))
    for adapter, count in groups:
        check_rows(first, count, tokens)
        rank = adapter.rank if adapter is not None else 0
        table = checked_address(adapter.table, torch.int64, (layers, len(SITES), 2)) if adapter is not None else 0
        for begin in range(first, first + count, most):
            yield begin, min(most, first + count - begin), rank, table
        first += count
    if first != tokens:
        raise ValueError(f"adapters are given for {first} of {tokens} tokens")
