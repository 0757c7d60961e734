"""Functions of each number in a row, and of whole rows: softmax and gate, vectorised.

All addresses are plain integers, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine_worker.compiled.memory import floats
from engine_worker.compiled.vector import (
    F32,
    FEATURES,
    I32,
    LANES,
    VECTOR,
    call,
    close,
    int64,
    load,
    loop,
    splat,
    store,
)

_AVX512: Final = LANES == 16 and bool(FEATURES.get("avx512f"))
_MASK: Final = ir.IntType(max(LANES, 1))
_NEAREST: Final = 4
"""Rounding as the processor is set."""


@intrinsic
def largest(typing_context: Any, row: Any, vectors: Any) -> Any:
    """The largest of `vectors` times LANES float32 at `row`; NaN does not count."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, vectors = args
        least = ir.Constant(VECTOR, [float("-inf")] * LANES)
        index, value, head, _ = loop(builder, vectors, least)
        read = load(builder, builder.add(row, builder.mul(index, int64(4 * LANES))), VECTOR)
        best = call(builder, f"llvm.maxnum.v{LANES}f32", VECTOR, value, read)
        close(builder, index, vectors, head, value, best)
        return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, best)

    return types.float32(types.intp, types.intp), generate


def _exponential(builder: Any, x: Any) -> Any:
    """e^x of a vector, to 2 units in the last place, 0 below -87; NaN stays NaN.

    2^n times a polynomial of the rest, the classic reduction (Cephes' expf).
    """

    def constant(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * LANES)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, a, b, c)

    tiny = builder.fcmp_ordered("<", x, constant(-87.0))
    bounded = builder.select(tiny, constant(0.0), x)
    large = builder.fcmp_ordered(">", bounded, constant(87.0))
    bounded = builder.select(large, constant(87.0), bounded)
    turns = call(
        builder, f"llvm.rint.v{LANES}f32", VECTOR, builder.fmul(bounded, constant(1.44269504088896341))
    )
    rest = fma(turns, constant(-0.693359375), bounded)
    rest = fma(turns, constant(2.12194440e-4), rest)
    value = constant(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = fma(value, rest, constant(term))
    value = fma(value, builder.fmul(rest, rest), builder.fadd(rest, constant(1.0)))
    if _AVX512:
        # In one instruction, whose mask makes the lanes of `tiny` 0.
        kept = builder.bitcast(builder.not_(tiny), _MASK)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return call(builder, name, VECTOR, value, turns, constant(0.0), kept, ir.Constant(I32, _NEAREST))
    integers = ir.VectorType(I32, LANES)
    # NaN to an integer is poison: those lanes take 0 here, their NaN is in `value` already.
    ordered = builder.fcmp_ordered("ord", turns, turns)
    whole = builder.fptosi(builder.select(ordered, turns, constant(0.0)), integers)
    bits = builder.shl(
        builder.add(whole, ir.Constant(integers, [127] * LANES)), ir.Constant(integers, [23] * LANES)
    )
    value = builder.fmul(value, builder.bitcast(bits, VECTOR))
    return builder.select(tiny, constant(0.0), value)


@intrinsic
def exponentials(typing_context: Any, row: Any, peak: Any, vectors: Any) -> Any:
    """Turns `vectors` times LANES float32 at `row` into e^(x - peak), and returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, peak, vectors = args
        peaks = splat(builder, peak)
        index, value, head, _ = loop(builder, vectors, ir.Constant(VECTOR, None))
        address = builder.add(row, builder.mul(index, int64(4 * LANES)))
        made = _exponential(builder, builder.fsub(load(builder, address, VECTOR), peaks))
        store(builder, made, address)
        total = builder.fadd(value, made)
        close(builder, index, vectors, head, value, total)
        none = ir.Constant(F32, -0.0)
        # In any order: from the first lane to the last would be a chain of dependent additions.
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return call(builder, name, F32, none, total, fastmath=("reassoc",))

    return types.float32(types.intp, types.float32, types.intp), generate


def _quotient(builder: Any, number: Any, divisor: Any) -> Any:
    """number / divisor, to a unit in the last place; `divisor`: from 1 to e^87."""
    if not _AVX512:
        return builder.fdiv(number, divisor)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, a, b, c)

    # A division keeps its unit busy for sixteen cycles. Here 14 bits of 1 / divisor, and Newton's step to the rest.
    less = builder.fneg(divisor)
    name, every = "llvm.x86.avx512.rcp14.ps.512", ir.Constant(_MASK, -1)
    inverse = call(builder, name, VECTOR, divisor, ir.Constant(VECTOR, None), every)
    inverse = fma(fma(less, inverse, ir.Constant(VECTOR, [1.0] * LANES)), inverse, inverse)
    near = builder.fmul(number, inverse)
    return fma(fma(less, near, number), inverse, near)


def _tangent(builder: Any, x: Any) -> Any:
    """tanh of a vector, to 2 units in the last place; NaN stays NaN (Cephes' tanhf)."""

    def constant(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * LANES)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, a, b, c)

    size = call(builder, f"llvm.fabs.v{LANES}f32", VECTOR, x)
    above = builder.fadd(constant(1.0), _exponential(builder, builder.fadd(size, size)))
    far = builder.fsub(constant(1.0), _quotient(builder, constant(2.0), above))
    far = call(builder, f"llvm.copysign.v{LANES}f32", VECTOR, far, x)
    # Near 0 that would be the difference of two numbers near 1.
    square = builder.fmul(x, x)
    near = constant(-5.70498872745e-3)
    for term in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        near = fma(near, square, constant(term))
    near = fma(builder.fmul(x, square), near, x)
    return builder.select(builder.fcmp_ordered("<", size, constant(0.625)), near, far)


@intrinsic
def capped(typing_context: Any, first: Any, cap: Any, rows: Any, vectors: Any, lead: Any) -> Any:
    """x becomes cap * tanh(x / cap): `rows` times `vectors` times LANES float32, `lead` numbers from row to row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, cap, rows, vectors, lead = args
        caps = splat(builder, cap)
        parts = builder.fdiv(ir.Constant(VECTOR, [1.0] * LANES), caps)
        row, _, next_row, _ = loop(builder, rows)
        column, _, head, _ = loop(builder, vectors)
        number = builder.add(builder.mul(row, lead), builder.mul(column, int64(LANES)))
        address = builder.add(first, builder.mul(number, int64(4)))
        ratio = builder.fmul(load(builder, address, VECTOR), parts)
        store(builder, builder.fmul(_tangent(builder, ratio), caps), address)
        close(builder, column, vectors, head)
        close(builder, row, rows, next_row)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, *[types.intp] * 3), generate


def _gate(weighed: Callable[[Any, Any], Any]) -> Any:
    """target = gate * sigmoid(weighed(gate)) * up. `gate`, `up`: `rows` times `vectors` times LANES float32; in
    `target`, which may be `gate`, a row begins `lead` numbers after the one before."""

    @intrinsic
    def gate_of(
        typing_context: Any, gate: Any, up: Any, rows: Any, vectors: Any, target: Any, lead: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            gate, up, rows, vectors, target, lead = args
            one = ir.Constant(VECTOR, [1.0] * LANES)
            row, _, next_row, _ = loop(builder, rows)
            column, _, head, _ = loop(builder, vectors)
            place = builder.mul(builder.add(builder.mul(row, vectors), column), int64(4 * LANES))
            g = load(builder, builder.add(gate, place), VECTOR)
            u = load(builder, builder.add(up, place), VECTOR)
            below = builder.fadd(one, _exponential(builder, builder.fneg(weighed(builder, g))))
            number = builder.add(builder.mul(row, lead), builder.mul(column, int64(LANES)))
            made = builder.fmul(_quotient(builder, g, below), u)
            store(builder, made, builder.add(target, builder.mul(number, int64(4))))
            close(builder, column, vectors, head)
            close(builder, row, rows, next_row)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return gate_of


def _cubic(builder: Any, x: Any) -> Any:
    """2 sqrt(2 / pi) (x + 0.044715 x^3), whose sigmoid is GELU's, as tanh approximates it (Hendrycks, Gimpel, 2016)."""
    linear, cubic = (ir.Constant(VECTOR, [factor * 1.5957691216057308] * LANES) for factor in (1.0, 0.044715))
    square = builder.fmul(x, x)
    return builder.fmul(x, call(builder, f"llvm.fma.v{LANES}f32", VECTOR, square, cubic, linear))


silu_gate: Final = _gate(lambda builder, x: x)
gelu_gate: Final = _gate(_cubic)


@intrinsic
def sum_of_squares(typing_context: Any, row: Any, vectors: Any) -> Any:
    """Of `vectors` times LANES float32 at `row`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, vectors = args
        index, value, head, _ = loop(builder, vectors, ir.Constant(VECTOR, None))
        read = load(builder, builder.add(row, builder.mul(index, int64(4 * LANES))), VECTOR)
        total = call(builder, f"llvm.fma.v{LANES}f32", VECTOR, read, read, value)
        close(builder, index, vectors, head, value, total)
        none = ir.Constant(F32, -0.0)
        return call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, none, total, fastmath=("reassoc",))

    return types.float32(types.intp, types.intp), generate


@intrinsic
def scaled(typing_context: Any, row: Any, factor: Any, scales: Any, target: Any, vectors: Any) -> Any:
    """target = scales * (row * factor), each `vectors` times LANES float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, factor, scales, target, vectors = args
        factors = splat(builder, factor)
        index, _, head, _ = loop(builder, vectors)
        offset = builder.mul(index, int64(4 * LANES))
        value = builder.fmul(load(builder, builder.add(row, offset), VECTOR), factors)
        value = builder.fmul(value, load(builder, builder.add(scales, offset), VECTOR))
        store(builder, value, builder.add(target, offset))
        close(builder, index, vectors, head)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.intp, types.intp), generate


@intrinsic
def _turned(typing_context: Any, source: Any, lead: Any, rows: Any, target: Any) -> Any:
    """float32[rows][LANES], `lead` numbers from row to row, to [LANES][rows]; `rows`: half of LANES to all."""

    def shuffled(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), lanes))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, lead, rows, target = args
        last = builder.sub(rows, int64(1))
        vectors = []
        for row in range(LANES):
            number = builder.select(builder.icmp_signed("<", int64(row), rows), int64(row), last)
            offset = builder.mul(builder.mul(number, lead), int64(4))
            vectors.append(load(builder, builder.add(source, offset), VECTOR))
        # Bit by bit of a number's place, its row and its lane change places.
        for bit in (1 << power for power in range(LANES.bit_length() - 1)):
            for low in (row for row in range(LANES) if not row & bit):
                pair = vectors[low], vectors[low + bit]
                lanes = range(LANES)
                vectors[low] = shuffled(
                    builder, *pair, [LANES + lane - bit if lane & bit else lane for lane in lanes]
                )
                vectors[low + bit] = shuffled(
                    builder, *pair, [LANES + lane if lane & bit else lane + bit for lane in lanes]
                )
        at = [builder.add(target, builder.mul(rows, int64(4 * column))) for column in range(LANES)]
        # What is written beyond a column is the beginning of the next, which comes after it.
        for column in range(LANES - 1):
            store(builder, vectors[column], at[column])
        integers = ir.VectorType(I32, LANES)
        count = splat(builder, builder.trunc(rows, I32), integers)
        kept = builder.icmp_unsigned("<", ir.Constant(integers, list(range(LANES))), count)
        pointer = builder.inttoptr(at[-1], VECTOR.as_pointer())
        name = f"llvm.masked.store.v{LANES}f32.p0"
        call(builder, name, ir.VoidType(), vectors[-1], pointer, ir.Constant(I32, 4), kept)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@njit(nogil=True)
def turned(source: int, lead: int, rows: int, columns: int, target: int) -> None:
    """float32[rows][columns], `lead` numbers from row to row, to [columns][rows]."""
    done = 0
    if LANES / 2 <= rows <= LANES:
        done = columns // LANES * LANES
        for first in range(0, done, LANES):
            _turned(source + 4 * first, lead, rows, target + 4 * first * rows)
    read, out = floats(source, (rows - 1) * lead + columns), floats(target, columns * rows)
    for column in range(done, columns):
        for row in range(rows):
            out[column * rows + row] = read[row * lead + column]
