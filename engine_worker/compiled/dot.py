"""A tile of a product of bytes: what linear layers with 8-bit weights are made of where the processor can.

    c[rows, WIDTH] (+)= a[rows, depth] b[depth, WIDTH]

One instruction (VPDPBUSD of AVX-512 VNNI: Intel, "Intrinsics Guide"; Rodriguez et al., "Lower Numerical
Precision Deep Learning Inference and Training", 2018) multiplies four pairs of bytes per lane and adds
them up, four times what a float32 multiply-add does.

Weights are unsigned, w + 128, with a scale per column. Activations are signed, rounded to 127 steps of the
largest of their row in each GROUP of the depth: one outlier coarsens its own group alone. The sum of a group
is an exact integer; it begins at -128 times the sum of the row's bytes, which takes the weights' 128 away
again, and is scaled into a float32.

Activations: [tiles][groups] of float32[rows] scales, int32[rows] beginnings, int8[rows][GROUP].
Weights, a panel: float32[WIDTH] scales, uint8[groups * GROUP / 4][WIDTH][4].
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine_worker.compiled.tile import prefetch, write_out
from engine_worker.compiled.vector import (
    F32,
    FEATURES,
    I1,
    I8,
    I32,
    I64,
    LANES,
    MAX_ROWS,
    VECTOR,
    VECTORS,
    WIDTH,
    call,
    close,
    int64,
    load,
    loop,
    splat,
    store,
)

AVAILABLE: Final = LANES == 16 and bool(FEATURES.get("avx512vnni"))
GROUP: Final = 64
"""Numbers of a row that share a scale."""
_INTEGERS: Final = ir.VectorType(I32, max(LANES, 1))
_BYTES: Final = ir.VectorType(I8, 4 * max(LANES, 1))
_STEPS: Final = GROUP // 4
_ROW_BYTES: Final = GROUP + 8


@njit(nogil=True)
def groups(depth: int) -> int:
    return (depth + GROUP - 1) // GROUP


@njit(nogil=True)
def tile_bytes(rows: int, depth: int) -> int:
    """Bytes of one tile of activations."""
    return groups(depth) * rows * _ROW_BYTES


def _define_tile(module: Any, rows: int) -> Any:
    """The machine code of one tile height. Arguments as `dot_tile`'s, without `rows`."""
    name = f"weir_dot_{rows}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*[I64] * 5, I1, I64]), name)
    function.linkage = "linkonce_odr"
    a, panel, count, c, ldc, accumulate, ahead = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    zero = ir.Constant(VECTOR, None)
    # In memory: with the integer sums they are more than there are registers, and each is touched once a group.
    sums = [[builder.alloca(VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
    for places in sums:
        for place in places:
            builder.store(zero, place, align=64)
    weights = builder.add(panel, int64(4 * WIDTH))

    group, _, head, _ = loop(builder, count)
    block = builder.add(a, builder.mul(group, int64(rows * _ROW_BYTES)))
    begin = [
        splat(builder, load(builder, builder.add(block, int64(4 * (rows + row))), I32), _INTEGERS)
        for row in range(rows)
    ]
    found = [[begin[row]] * VECTORS for row in range(rows)]
    bytes_at = builder.add(block, int64(8 * rows))
    weights_at = builder.add(weights, builder.mul(group, int64(GROUP * WIDTH)))
    ahead_at = builder.add(ahead, builder.mul(group, int64(GROUP * WIDTH)))
    for step in range(_STEPS):
        offset = step * 4 * WIDTH
        columns = [
            load(builder, builder.add(weights_at, int64(offset + 4 * LANES * vector)), _BYTES)
            for vector in range(VECTORS)
        ]
        for row in range(rows):
            four = load(builder, builder.add(bytes_at, int64(GROUP * row + 4 * step)), I32)
            value = builder.bitcast(splat(builder, four, _INTEGERS), _BYTES)
            for vector in range(VECTORS):
                name = "llvm.x86.avx512.vpdpbusd.512"
                found[row][vector] = call(
                    builder, name, _INTEGERS, found[row][vector], columns[vector], value
                )
        prefetch(builder, builder.add(ahead_at, int64(offset)), 4 * WIDTH)
    for row in range(rows):
        scale = splat(builder, load(builder, builder.add(block, int64(4 * row)), F32))
        for vector in range(VECTORS):
            whole = builder.sitofp(found[row][vector], VECTOR)
            total = builder.load(sums[row][vector], align=64, typ=VECTOR)
            builder.store(
                call(builder, f"llvm.fma.v{LANES}f32", VECTOR, whole, scale, total),
                sums[row][vector],
                align=64,
            )
    close(builder, group, count, head)

    scales = [
        load(builder, builder.add(panel, int64(4 * LANES * vector)), VECTOR) for vector in range(VECTORS)
    ]
    totals = [
        [
            builder.fmul(builder.load(place, align=64, typ=VECTOR), scale)
            for place, scale in zip(places, scales, strict=True)
        ]
        for places in sums
    ]
    write_out(builder, totals, c, ldc, accumulate)
    return function


@intrinsic
def _emit_tile(
    typing_context: Any,
    rows: Any,
    a: Any,
    panel: Any,
    count: Any,
    c: Any,
    ldc: Any,
    accumulate: Any,
    ahead: Any,
) -> Any:
    signature = types.void(*[types.intp] * 6, types.boolean, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, *rest = args
        if AVAILABLE:
            after = builder.append_basic_block("tiled")
            switch = builder.switch(rows, after)
            for height in range(1, MAX_ROWS + 1):
                case = builder.append_basic_block(f"rows{height}")
                switch.add_case(int64(height), case)
                with builder.goto_block(case):
                    builder.call(_define_tile(builder.module, height), rest)
                    builder.branch(after)
            builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True, cache=True)
def dot_tile(
    rows: int, a: int, panel: int, count: int, c: int, ldc: int, accumulate: bool, ahead: int
) -> None:
    """One tile. `rows`: 1 to MAX_ROWS; `count`: groups; `ldc`: elements from one row of float32 `c` to the next.

    From `ahead` on, as much memory as the panel takes is fetched into the cache.
    """
    _emit_tile(rows, a, panel, count, c, ldc, accumulate, ahead)


@intrinsic
def _round_group(typing_context: Any, source: Any, scale_at: Any, begin_at: Any, target: Any) -> Any:
    """GROUP float32 at `source` as int8 at `target`, with their scale and beginning."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, scale_at, begin_at, target = args
        if not AVAILABLE:
            return context.get_dummy_value()
        values = [
            load(builder, builder.add(source, int64(4 * LANES * part)), VECTOR)
            for part in range(GROUP // LANES)
        ]
        # Numbers without their sign are ordered as their bits are, and NaN, which has to reach the result, is largest.
        most = ir.Constant(_INTEGERS, None)
        for value in values:
            bits = builder.and_(
                builder.bitcast(value, _INTEGERS), ir.Constant(_INTEGERS, [0x7FFFFFFF] * LANES)
            )
            most = call(builder, f"llvm.smax.v{LANES}i32", _INTEGERS, most, bits)
        most = call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", I32, most)
        # Not 0: 0 / 0 would be NaN. Not less than this: its inverse has to be a float32.
        least = ir.Constant(I32, (127 - 100) << 23)
        peak = builder.bitcast(call(builder, "llvm.smax.i32", I32, most, least), F32)
        store(builder, builder.fdiv(peak, ir.Constant(F32, 127.0)), scale_at)
        inverse = splat(builder, builder.fdiv(ir.Constant(F32, 127.0), peak))
        total = ir.Constant(_INTEGERS, None)
        for part, value in enumerate(values):
            whole = call(
                builder, "llvm.x86.avx512.mask.cvtps2dq.512", _INTEGERS, builder.fmul(value, inverse),
                ir.Constant(_INTEGERS, None), ir.Constant(ir.IntType(LANES), -1), ir.Constant(I32, 4),
            )  # fmt: skip
            total = builder.add(total, whole)
            bytes_of = builder.trunc(whole, ir.VectorType(I8, LANES))
            store(builder, bytes_of, builder.add(target, int64(LANES * part)))
        amount = call(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, total)
        store(builder, builder.mul(amount, ir.Constant(I32, -128)), begin_at)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@njit(nogil=True, cache=True)
def quantise(source: int, depth: int, target: int, index: int, rows: int) -> None:
    """One row, float32[depth] with zeros up to a whole number of groups, as row `index` of tiled activations."""
    number = index % rows
    block = target + index // rows * tile_bytes(rows, depth)
    for group in range(groups(depth)):
        _round_group(
            source + 4 * group * GROUP,
            block + 4 * number,
            block + 4 * (rows + number),
            block + 8 * rows + GROUP * number,
        )
        block += rows * _ROW_BYTES
