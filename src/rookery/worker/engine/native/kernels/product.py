"""The product of matrices that all kernels are made of.

Promise: each number of the result is one chain of fused multiply-adds along the contraction, whatever the shapes of the
two matrices are and however a kernel divides them.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils, types

from rookery.worker.engine.native.kernels.vec import (
    FLOAT,
    INT64,
    LANES,
    VECTOR,
    device_function,
    emit_address,
    emit_intrinsic,
    emit_load,
    emit_splat,
    operation,
)


def _emit_panel(rows: int, columns: int, half: bool) -> Any:
    """``panel(x, x_stride, w, w_stride, w_column, depth, out, out_stride)`` of this many rows and columns of vectors,
    whose sums are in registers along the contraction."""

    def panel(
        builder: Any, x: Any, x_stride: Any, w: Any, w_stride: Any, w_column: Any, depth: Any, out: Any, out_stride: Any
    ) -> None:
        def out_index(row: int, column: int) -> Any:
            start = builder.mul(out_stride, ir.Constant(INT64, row))
            return builder.add(start, ir.Constant(INT64, LANES * column))

        cells = [(row, column) for row in range(rows) for column in range(columns)]
        sums = {
            cell: cgutils.alloca_once_value(builder, emit_load(builder, out, out_index(*cell), False)) for cell in cells
        }
        with cgutils.for_range(builder, depth) as loop:
            start = builder.mul(loop.index, w_stride)
            starts = [
                builder.add(start, builder.mul(w_column, ir.Constant(INT64, column))) for column in range(columns)
            ]
            weights = [emit_load(builder, w, at, half) for at in starts]
            for row in range(rows):
                at = builder.add(builder.mul(x_stride, ir.Constant(INT64, row)), loop.index)
                number = emit_splat(builder, builder.load(emit_address(builder, x, at, 4, FLOAT), align=4))
                for column in range(columns):
                    cell = sums[row, column]
                    builder.store(emit_intrinsic(builder, "fma", number, weights[column], builder.load(cell)), cell)
        for cell in cells:
            builder.store(builder.load(sums[cell]), emit_address(builder, out, out_index(*cell), 4, VECTOR), align=4)

    panel.__name__ = f"panel_{rows}_{columns}_{'half' if half else 'float'}"
    return operation(types.none, (types.int64,) * 8)(panel)


def _row_tile(rows: int, columns: int) -> Any:
    """A product of ``rows`` rows, ``columns`` vectors at a time."""
    several_half, several_float = _emit_panel(rows, columns, True), _emit_panel(rows, columns, False)
    one_half, one_float = _emit_panel(rows, 1, True), _emit_panel(rows, 1, False)

    @device_function
    def tile(
        x: int,
        x_stride: int,
        w: int,
        w_stride: int,
        w_column: int,
        depth: int,
        out: int,
        out_stride: int,
        vectors: int,
        half: int,
    ) -> None:
        at = 0
        while at + columns <= vectors:
            here = out + 4 * LANES * at
            if half:
                several_half(x, x_stride, w + 2 * w_column * at, w_stride, w_column, depth, here, out_stride)
            else:
                several_float(x, x_stride, w + 4 * w_column * at, w_stride, w_column, depth, here, out_stride)
            at += columns
        while at < vectors:
            here = out + 4 * LANES * at
            if half:
                one_half(x, x_stride, w + 2 * w_column * at, w_stride, w_column, depth, here, out_stride)
            else:
                one_float(x, x_stride, w + 4 * w_column * at, w_stride, w_column, depth, here, out_stride)
            at += 1

    return tile


_WIDE_REGISTERS = bool(llvm.get_host_cpu_features().get("avx512f"))
"""Whether a vector is one register, of 32; else it is two, of 16, and sums of more than four vectors do not fit."""

_eight, _four = (_row_tile(8, 2), _row_tile(4, 4)) if _WIDE_REGISTERS else (_row_tile(8, 1), _row_tile(4, 1))
_three = _row_tile(3, 4) if _WIDE_REGISTERS else _row_tile(3, 1)
_two, _one = (_row_tile(2, 4), _row_tile(1, 4)) if _WIDE_REGISTERS else (_row_tile(2, 2), _row_tile(1, 4))


def _product(
    x: int,
    x_stride: int,
    rows: int,
    w: int,
    w_stride: int,
    w_column: int,
    depth: int,
    out: int,
    out_stride: int,
    vectors: int,
    half: int,
) -> None:
    row = 0
    while row < rows:
        here, there = x + 4 * row * x_stride, out + 4 * row * out_stride
        if rows - row >= 8:
            _eight(here, x_stride, w, w_stride, w_column, depth, there, out_stride, vectors, half)
            row += 8
        elif rows - row >= 4:
            _four(here, x_stride, w, w_stride, w_column, depth, there, out_stride, vectors, half)
            row += 4
        elif rows - row == 3:
            _three(here, x_stride, w, w_stride, w_column, depth, there, out_stride, vectors, half)
            row += 3
        elif rows - row >= 2:
            _two(here, x_stride, w, w_stride, w_column, depth, there, out_stride, vectors, half)
            row += 2
        else:
            _one(here, x_stride, w, w_stride, w_column, depth, there, out_stride, vectors, half)
            row += 1


_PRODUCT = types.none(*[types.int64] * 11)
_compiled: list[Any] = []

multiply: Any = types.ExternalFunction("rookery_product", _PRODUCT)
"""``multiply(x, x_stride, rows, w, w_stride, w_column, depth, out, out_stride, vectors, half)``: ``out`` += x · w, with
x [rows, depth] float32, w [depth, 16 · vectors] (``half``), out [rows, 16 · vectors] float32.

Strides are in elements, between rows; ``w_column`` is that between the vectors of one row of w. Each number of ``out``
is one chain of fused multiply-adds that begins with its value and follows the contraction from its first to its last
index, for any number of rows and vectors."""


def compile_product(*, cached: bool) -> None:
    """Compiles ``multiply``'s code, once; kernels find it by its symbol, or each one would hold a copy of it."""
    if not _compiled:
        _compiled.append(numba.cfunc(_PRODUCT, cache=cached, error_model="numpy")(_product))
        llvm.add_symbol("rookery_product", _compiled[0].address)
