"""Vectors of 16 float32 numbers in Numba functions, and the product that all kernels are made of.

Everything here is one LLVM operation or a fixed sequence of them: registers, fused multiply-adds and the order of sums
are explicit, fast-math is off, and nothing depends on LLVM's vectoriser. The results are the same bits for every
instruction set; a processor with shorter registers splits each operation.

Memory is an address in bytes (int64) and an index in elements. A number in memory is a float32, or with ``half`` a
bfloat16, whose bits are the upper half of a float32's. Addresses are not checked here: ``runtime.Arguments`` checks the
tensors behind them.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
"""Numbers in a vector; rows, ranks and heads that kernels take are multiples of it."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_INT64 = ir.IntType(64)

device_function = numba.njit(error_model="numpy", inline="never")
"""Decorates a function that kernels call. It is compiled into every kernel that calls it."""


class Vector(types.Type):
    """The Numba type ``<16 x float>``."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VECTOR)


Emit = Callable[..., Any]


def _operation(result: types.Type, arguments: Sequence[types.Type]) -> Callable[[Emit], Any]:
    """Decorates ``emit(builder, *values) → value``, the LLVM code of a function with this signature."""

    def decorate(emit: Emit) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if result is types.none else value

        def typed(typing_context: Any, *given: Any) -> Any:
            return result(*arguments), codegen

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # Numba reads the names
        return intrinsic(typed)

    return decorate


def _splat(number: ir.Constant | Any, of: ir.VectorType = _VECTOR) -> Any:
    return ir.Constant(of, [number] * LANES)


def _address(builder: Any, base: Any, index: Any, size: int, of: ir.Type) -> Any:
    offset = builder.add(base, builder.mul(index, ir.Constant(_INT64, size)))
    return builder.inttoptr(offset, of.as_pointer())


def _widen(builder: Any, halves: Any) -> Any:
    wide = builder.zext(halves, _BITS)
    return builder.bitcast(builder.shl(wide, _splat(16, _BITS)), _VECTOR)


def _load(builder: Any, base: Any, index: Any, half: bool) -> Any:
    if half:
        return _widen(builder, builder.load(_address(builder, base, index, 2, _HALVES), align=2))
    return builder.load(_address(builder, base, index, 4, _VECTOR), align=4)


def _call(builder: Any, name: str, *values: Any) -> Any:
    """An LLVM intrinsic of vectors."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * len(values)), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, values)


_int, _float = types.int64, types.float32


@_operation(vector, (_int, _int))
def load_float(builder: Any, base: Any, index: Any) -> Any:
    """16 float32 numbers."""
    return _load(builder, base, index, False)


@_operation(vector, (_int, _int))
def load_half(builder: Any, base: Any, index: Any) -> Any:
    """16 bfloat16 numbers."""
    return _load(builder, base, index, True)


@_operation(types.none, (_int, _int, vector))
def store_float(builder: Any, base: Any, index: Any, value: Any) -> None:
    builder.store(value, _address(builder, base, index, 4, _VECTOR), align=4)


@_operation(vector, (vector,))
def round_half(builder: Any, value: Any) -> Any:
    """Each number rounded to the nearest bfloat16, ties to even; the upper 16 bits hold it. NaN stays NaN."""
    bits = builder.bitcast(value, _BITS)
    odd = builder.and_(builder.lshr(bits, _splat(16, _BITS)), _splat(1, _BITS))
    rounded = builder.add(bits, builder.add(odd, _splat(0x7FFF, _BITS)))
    nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(nan, _splat(0x7FC00000, _BITS), rounded)
    return builder.bitcast(builder.and_(rounded, _splat(0xFFFF0000, _BITS)), _VECTOR)


@_operation(types.none, (_int, _int, vector))
def store_half(builder: Any, base: Any, index: Any, value: Any) -> None:
    """Stores the upper halves: numbers that ``round_half`` returned."""
    upper = builder.lshr(builder.bitcast(value, _BITS), _splat(16, _BITS))
    builder.store(builder.trunc(upper, _HALVES), _address(builder, base, index, 2, _HALVES), align=2)


@_operation(vector, (_float,))
def splat(builder: Any, number: Any) -> Any:
    """The number in all lanes."""
    return _broadcast(builder, number)


def _broadcast(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _splat(0, _BITS))


@_operation(vector, (vector, vector, vector))
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    return _call(builder, "fma", a, b, c)


@_operation(vector, (vector,))
def floor(builder: Any, a: Any) -> Any:
    return _call(builder, "floor", a)


@_operation(vector, (vector, vector, vector, vector))
def where_less(builder: Any, a: Any, b: Any, then: Any, other: Any) -> Any:
    """``then`` where a < b, else ``other``; a NaN is not less."""
    return builder.select(builder.fcmp_ordered("<", a, b), then, other)


@_operation(vector, (vector, vector, vector))
def where_nan(builder: Any, a: Any, then: Any, other: Any) -> Any:
    """``then`` where a is NaN, else ``other``."""
    return builder.select(builder.fcmp_unordered("uno", a, a), then, other)


@_operation(vector, (vector,))
def power_of_two(builder: Any, n: Any) -> Any:
    """2ⁿ of whole numbers from -126 to 127."""
    biased = builder.add(builder.fptosi(n, _BITS), _splat(127, _BITS))
    return builder.bitcast(builder.shl(biased, _splat(23, _BITS)), _VECTOR)


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves the vector until one number is left: lane i meets lane i + 8, then i + 4, i + 2, i + 1."""
    width = LANES
    while width > 1:
        width //= 2
        mask = ir.Constant(_BITS, [(i + width) % LANES for i in range(LANES)])
        value = combine(value, builder.shuffle_vector(value, value, mask))
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@_operation(_float, (vector,))
def sum_lanes(builder: Any, value: Any) -> Any:
    """The sum in the order of ``_fold``."""
    return _fold(builder, value, builder.fadd)


@_operation(_float, (vector,))
def max_lanes(builder: Any, value: Any) -> Any:
    """The maximum; which number is returned if one is NaN is not defined."""
    return _fold(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@_operation(_float, (_int, _int))
def read_float(builder: Any, base: Any, index: Any) -> Any:
    """One float32."""
    return builder.load(_address(builder, base, index, 4, _FLOAT), align=4)


@_operation(types.none, (_int, _int, _float))
def write_float(builder: Any, base: Any, index: Any, number: Any) -> None:
    builder.store(number, _address(builder, base, index, 4, _FLOAT), align=4)


@_operation(types.none, (_int, _int, _float))
def write_half(builder: Any, base: Any, index: Any, number: Any) -> None:
    """Stores the upper half: of a number that ``round_half`` returned."""
    half = ir.IntType(16)
    upper = builder.lshr(builder.bitcast(number, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    builder.store(builder.trunc(upper, half), _address(builder, base, index, 2, half), align=2)


@_operation(_int, (_int, _int))
def read_int(builder: Any, base: Any, index: Any) -> Any:
    """One int64."""
    return builder.load(_address(builder, base, index, 8, _INT64), align=8)


@_operation(types.none, (_int, _int, _int))
def write_int(builder: Any, base: Any, index: Any, number: Any) -> None:
    builder.store(number, _address(builder, base, index, 8, _INT64), align=8)


@_operation(_int, (_int, _int))
def fetch_increment(builder: Any, base: Any, index: Any) -> Any:
    """Adds 1 to an int64 that threads share; returns its value before."""
    counter = _address(builder, base, index, 8, _INT64)
    return builder.atomic_rmw("add", counter, ir.Constant(_INT64, 1), "monotonic")


def _define_operator(function: Any, instruction: str) -> None:
    """Defines an operator of two vectors as one LLVM instruction."""
    infer_global(function)(type("_Operator", (ConcreteTemplate,), {"key": function, "cases": [_BINARY]}))

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    lower_builtin(function, Vector, Vector)(lower)


_BINARY = vector(vector, vector)
_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


@device_function
def load(base: int, index: int, half: int) -> Any:
    """16 numbers, as float32."""
    return load_half(base, index) if half else load_float(base, index)


@device_function
def store(base: int, index: int, value: Any, half: int) -> None:
    """Stores 16 numbers, rounded if ``half``."""
    if half:
        store_half(base, index, round_half(value))
    else:
        store_float(base, index, value)


@device_function
def rounded(value: Any, half: int) -> Any:
    """The numbers that ``store`` stores."""
    return round_half(value) if half else value


_LOWEST, _HIGHEST = -87.0, 88.0
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 0.693359375, math.log(2.0) - 0.693359375
_EXP = tuple(1.0 / math.factorial(n) for n in range(7, -1, -1))


@device_function
def exp(x: Any) -> Any:
    """eˣ within 2 units in the last place; 0 below -87, infinite above 88, NaN of NaN."""
    n = floor(fma(x, splat(_LOG2_E), splat(0.5)))
    r = fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x))
    p = splat(_EXP[0])
    for i in range(1, len(_EXP)):
        p = fma(p, r, splat(_EXP[i]))
    p = p * power_of_two(n)
    p = where_less(x, splat(_LOWEST), splat(0.0), p)
    p = where_less(splat(_HIGHEST), x, splat(math.inf), p)
    return where_nan(x, x, p)


def _emit_panel(rows: int, columns: int, half: bool) -> Any:
    """``panel(x, x_stride, w, w_stride, w_column, depth, out, out_stride)`` of this many rows and columns of vectors,
    whose sums are in registers along the contraction."""

    def panel(
        builder: Any, x: Any, x_stride: Any, w: Any, w_stride: Any, w_column: Any, depth: Any, out: Any, out_stride: Any
    ) -> None:
        def out_index(row: int, column: int) -> Any:
            start = builder.mul(out_stride, ir.Constant(_INT64, row))
            return builder.add(start, ir.Constant(_INT64, LANES * column))

        cells = [(row, column) for row in range(rows) for column in range(columns)]
        sums = {
            cell: cgutils.alloca_once_value(builder, _load(builder, out, out_index(*cell), False)) for cell in cells
        }
        with cgutils.for_range(builder, depth) as loop:
            start = builder.mul(loop.index, w_stride)
            starts = [
                builder.add(start, builder.mul(w_column, ir.Constant(_INT64, column))) for column in range(columns)
            ]
            weights = [_load(builder, w, at, half) for at in starts]
            for row in range(rows):
                at = builder.add(builder.mul(x_stride, ir.Constant(_INT64, row)), loop.index)
                number = _broadcast(builder, builder.load(_address(builder, x, at, 4, _FLOAT), align=4))
                for column in range(columns):
                    cell = sums[row, column]
                    builder.store(_call(builder, "fma", number, weights[column], builder.load(cell)), cell)
        for cell in cells:
            builder.store(builder.load(sums[cell]), _address(builder, out, out_index(*cell), 4, _VECTOR), align=4)

    panel.__name__ = f"panel_{rows}_{columns}_{'half' if half else 'float'}"
    return _operation(types.none, (types.int64,) * 8)(panel)


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
    """See ``multiply``."""
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
_linked_product: Any = types.ExternalFunction("rookery_product", _PRODUCT)
_compiled: list[Any] = []


def compile_product(*, cached: bool) -> None:
    """Compiles ``multiply``'s code, once; kernels find it by its symbol, or each one would hold a copy of it."""
    if not _compiled:
        _compiled.append(numba.cfunc(_PRODUCT, cache=cached, error_model="numpy")(_product))
        llvm.add_symbol("rookery_product", _compiled[0].address)


@device_function
def multiply(
    x: int,
    x_stride: int,
    rows: int,
    w: int,
    w_stride: int,
    depth: int,
    out: int,
    out_stride: int,
    vectors: int,
    half: int,
    w_column: int = LANES,
) -> None:
    """``out`` += x · w: x [rows, depth] float32, w [depth, 16 · vectors] (``half``), out [rows, 16 · vectors] float32.

    Strides are in elements, between rows; ``w_column`` is that between the vectors of one row of w. Each number of
    ``out`` is one chain of fused multiply-adds that begins with its value and follows the contraction from its first to
    its last index, for any number of rows and vectors."""
    _linked_product(x, x_stride, rows, w, w_stride, w_column, depth, out, out_stride, vectors, half)
