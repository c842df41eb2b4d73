"""Vectors of 16 float32 numbers in Numba functions.

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

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
"""Numbers in a vector; rows, ranks and heads that kernels take are multiples of it."""

FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
INT64 = ir.IntType(64)

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
        super().__init__(dmm, fe_type, VECTOR)


Emit = Callable[..., Any]


def operation(result: types.Type, arguments: Sequence[types.Type]) -> Callable[[Emit], Any]:
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


def _splat(number: ir.Constant | Any, of: ir.VectorType = VECTOR) -> Any:
    return ir.Constant(of, [number] * LANES)


def emit_address(builder: Any, base: Any, index: Any, size: int, of: ir.Type) -> Any:
    offset = builder.add(base, builder.mul(index, ir.Constant(INT64, size)))
    return builder.inttoptr(offset, of.as_pointer())


def _widen(builder: Any, halves: Any) -> Any:
    wide = builder.zext(halves, _BITS)
    return builder.bitcast(builder.shl(wide, _splat(16, _BITS)), VECTOR)


def emit_load(builder: Any, base: Any, index: Any, half: bool) -> Any:
    if half:
        return _widen(builder, builder.load(emit_address(builder, base, index, 2, _HALVES), align=2))
    return builder.load(emit_address(builder, base, index, 4, VECTOR), align=4)


def emit_intrinsic(builder: Any, name: str, *values: Any) -> Any:
    """An LLVM intrinsic of vectors."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * len(values)), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, values)


_int, _float = types.int64, types.float32


@operation(vector, (_int, _int))
def load_float(builder: Any, base: Any, index: Any) -> Any:
    """16 float32 numbers."""
    return emit_load(builder, base, index, False)


@operation(vector, (_int, _int))
def load_half(builder: Any, base: Any, index: Any) -> Any:
    """16 bfloat16 numbers."""
    return emit_load(builder, base, index, True)


@operation(types.none, (_int, _int, vector))
def store_float(builder: Any, base: Any, index: Any, value: Any) -> None:
    builder.store(value, emit_address(builder, base, index, 4, VECTOR), align=4)


@operation(vector, (vector,))
def round_half(builder: Any, value: Any) -> Any:
    """Each number rounded to the nearest bfloat16, ties to even; the upper 16 bits hold it. NaN stays NaN."""
    bits = builder.bitcast(value, _BITS)
    odd = builder.and_(builder.lshr(bits, _splat(16, _BITS)), _splat(1, _BITS))
    rounded = builder.add(bits, builder.add(odd, _splat(0x7FFF, _BITS)))
    nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(nan, _splat(0x7FC00000, _BITS), rounded)
    return builder.bitcast(builder.and_(rounded, _splat(0xFFFF0000, _BITS)), VECTOR)


@operation(types.none, (_int, _int, vector))
def store_half(builder: Any, base: Any, index: Any, value: Any) -> None:
    """Stores the upper halves: numbers that ``round_half`` returned."""
    upper = builder.lshr(builder.bitcast(value, _BITS), _splat(16, _BITS))
    builder.store(builder.trunc(upper, _HALVES), emit_address(builder, base, index, 2, _HALVES), align=2)


@operation(vector, (_float,))
def splat(builder: Any, number: Any) -> Any:
    """The number in all lanes."""
    return emit_splat(builder, number)


def emit_splat(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), _splat(0, _BITS))


@operation(vector, (vector, vector, vector))
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    return emit_intrinsic(builder, "fma", a, b, c)


@operation(vector, (vector,))
def floor(builder: Any, a: Any) -> Any:
    return emit_intrinsic(builder, "floor", a)


@operation(vector, (vector, vector, vector, vector))
def where_less(builder: Any, a: Any, b: Any, then: Any, other: Any) -> Any:
    """``then`` where a < b, else ``other``; a NaN is not less."""
    return builder.select(builder.fcmp_ordered("<", a, b), then, other)


@operation(vector, (vector, vector, vector))
def where_nan(builder: Any, a: Any, then: Any, other: Any) -> Any:
    """``then`` where a is NaN, else ``other``."""
    return builder.select(builder.fcmp_unordered("uno", a, a), then, other)


@operation(vector, (vector,))
def power_of_two(builder: Any, n: Any) -> Any:
    """2ⁿ of whole numbers from -126 to 127."""
    biased = builder.add(builder.fptosi(n, _BITS), _splat(127, _BITS))
    return builder.bitcast(builder.shl(biased, _splat(23, _BITS)), VECTOR)


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves the vector until one number is left: lane i meets lane i + 8, then i + 4, i + 2, i + 1."""
    width = LANES
    while width > 1:
        width //= 2
        mask = ir.Constant(_BITS, [(i + width) % LANES for i in range(LANES)])
        value = combine(value, builder.shuffle_vector(value, value, mask))
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@operation(_float, (vector,))
def sum_lanes(builder: Any, value: Any) -> Any:
    """The sum in the order of ``_fold``."""
    return _fold(builder, value, builder.fadd)


@operation(_float, (vector,))
def max_lanes(builder: Any, value: Any) -> Any:
    """The maximum; which number is returned if one is NaN is not defined."""
    return _fold(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@operation(_float, (_int, _int))
def read_float(builder: Any, base: Any, index: Any) -> Any:
    """One float32."""
    return builder.load(emit_address(builder, base, index, 4, FLOAT), align=4)


@operation(types.none, (_int, _int, _float))
def write_float(builder: Any, base: Any, index: Any, number: Any) -> None:
    builder.store(number, emit_address(builder, base, index, 4, FLOAT), align=4)


@operation(types.none, (_int, _int, _float))
def write_half(builder: Any, base: Any, index: Any, number: Any) -> None:
    """Stores the upper half: of a number that ``round_half`` returned."""
    half = ir.IntType(16)
    upper = builder.lshr(builder.bitcast(number, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    builder.store(builder.trunc(upper, half), emit_address(builder, base, index, 2, half), align=2)


@operation(_int, (_int, _int))
def read_int(builder: Any, base: Any, index: Any) -> Any:
    """One int64."""
    return builder.load(emit_address(builder, base, index, 8, INT64), align=8)


@operation(types.none, (_int, _int, _int))
def write_int(builder: Any, base: Any, index: Any, number: Any) -> None:
    builder.store(number, emit_address(builder, base, index, 8, INT64), align=8)


@operation(_int, (_int, _int))
def fetch_increment(builder: Any, base: Any, index: Any) -> Any:
    """Adds 1 to an int64 that threads share; returns its value before."""
    counter = emit_address(builder, base, index, 8, INT64)
    return builder.atomic_rmw("add", counter, ir.Constant(INT64, 1), "monotonic")


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
