"""A tile of a matrix product, held in vector registers: what every product here is made of.

    c[rows, WIDTH] (+)= a[rows, depth] b[depth, WIDTH]

`a` lies with its rows innermost, [depth][rows], so that one address walks it; `b` has a row of
WIDTH contiguous numbers per step: float32, float16, or int8, with a scale per column or none. Per step that
is two loads of `b`, and for each row one broadcast of `a` and two fused multiply-adds: with 12 rows
of two 16-lane registers, 24 accumulators hide the latency of both multiply units. The layout and
the tile are those of BLIS (Van Zee, van de Geijn, "BLIS", ACM TOMS 41(3), 2015).

All addresses are plain integers, in bytes.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine_worker.compiled.vector import (
    F16,
    F32,
    I1,
    I8,
    I32,
    I64,
    LANES,
    LINE,
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

FLOAT: Final = 0
HALF: Final = 1
BYTE: Final = 2
LEVEL: Final = 3
"""Kinds of `b`. A panel of bytes begins with the float32 scales of its WIDTH columns; levels are bytes whose scales
the caller applies, to `a` or to `c`."""
SIZES: Final = (4, 2, 1, 1)
_KINDS: Final = (F32, F16, I8, I8)
SPREAD: Final = 4 * WIDTH
"""Numbers from one row of `a` to the next where its rows are not innermost."""


def _widened(builder: Any, kind: int, address: Any, scale: Any) -> Any:
    """LANES weights of a kind as float32; `scale`: those of their columns, for bytes."""
    loaded = load(builder, address, ir.VectorType(_KINDS[kind], LANES), align=SIZES[kind])
    if kind == HALF:
        return builder.fpext(loaded, VECTOR)
    if kind in (BYTE, LEVEL):
        whole = builder.sitofp(builder.sext(loaded, ir.VectorType(I32, LANES)), VECTOR)
        return builder.fmul(whole, scale) if kind == BYTE else whole
    return loaded


def _scales(builder: Any, kind: int, panel: Any) -> tuple[list[Any], Any]:
    """The columns' scales, and the address of the weights behind them."""
    if kind != BYTE:
        return [None] * VECTORS, panel
    scales = [
        load(builder, builder.add(panel, int64(4 * LANES * vector)), VECTOR) for vector in range(VECTORS)
    ]
    return scales, builder.add(panel, int64(4 * WIDTH))


def prefetch(builder: Any, address: Any, size: int) -> None:
    """Fetches `size` bytes into the second-level cache."""
    for offset in range(0, size, LINE):
        pointer = builder.inttoptr(builder.add(address, int64(offset)), I8.as_pointer())
        hints = (ir.Constant(I32, value) for value in (0, 2, 1))  # a read, to the second level, of data
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *hints)


def write_out(builder: Any, totals: list[list[Any]], c: Any, ldc: Any, accumulate: Any) -> None:
    """Ends a tile's function: stores its sums, or adds them to what `c` holds.

    The sum is made before it meets what was there: a residual may be far larger than its terms.
    """
    add, end = (builder.append_basic_block(label) for label in ("add", "end"))
    builder.cbranch(accumulate, add, end)
    for block in (add, end):
        builder.position_at_end(block)
        for row, vectors in enumerate(totals):
            for vector, total in enumerate(vectors):
                column = builder.add(builder.mul(ldc, int64(row)), int64(vector * LANES))
                address = builder.add(c, builder.mul(column, int64(4)))
                store(
                    builder,
                    builder.fadd(load(builder, address, VECTOR), total) if block is add else total,
                    address,
                )
        builder.ret_void()


def _define_tile(module: Any, rows: int, kind: int, spread: bool) -> Any:
    """The machine code of one tile height. Arguments as `tile`'s, without `kind`, `rows` and `spread`."""
    name = f"weir_tile_{rows}_{kind}_{spread:d}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*[I64] * 6, I1, I64, I64]), name)
    function.linkage = "linkonce_odr"
    a, b, ldb, depth, c, ldc, accumulate, ahead, ahead_step = function.args
    size = SIZES[kind]
    entry, step, done = (function.append_basic_block(label) for label in ("entry", "step", "done"))
    builder = ir.IRBuilder(entry)
    zero = ir.Constant(VECTOR, None)
    scales, b = _scales(builder, kind, b)
    builder.cbranch(builder.icmp_signed(">", depth, int64(0)), step, done)

    builder.position_at_end(step)
    walking = {"k": int64(0), "a": a, "b": b, "ahead": ahead}
    at = {}
    for label, start in walking.items():
        at[label] = builder.phi(I64)
        at[label].add_incoming(start, entry)
    sums = [[builder.phi(VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
    columns = [
        _widened(builder, kind, builder.add(at["b"], int64(vector * LANES * size)), scales[vector])
        for vector in range(VECTORS)
    ]
    added = []
    for row in range(rows):
        offset = 4 * row * (SPREAD if spread else 1)
        value = splat(builder, load(builder, builder.add(at["a"], int64(offset)), F32))
        added.append(
            [
                call(builder, f"llvm.fma.v{LANES}f32", VECTOR, value, columns[vector], sums[row][vector])
                for vector in range(VECTORS)
            ]
        )
    prefetch(builder, at["ahead"], WIDTH * size)
    following = {
        "k": builder.add(at["k"], int64(1)),
        "a": builder.add(at["a"], int64(4 if spread else 4 * rows)),
        "b": builder.add(at["b"], builder.mul(ldb, int64(size))),
        "ahead": builder.add(at["ahead"], ahead_step),
    }
    for label, value in following.items():
        at[label].add_incoming(value, step)
    for row in range(rows):
        for vector in range(VECTORS):
            sums[row][vector].add_incoming(zero, entry)
            sums[row][vector].add_incoming(added[row][vector], step)
    builder.cbranch(builder.icmp_signed("<", following["k"], depth), step, done)

    builder.position_at_end(done)
    totals = [[builder.phi(VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
    for row in range(rows):
        for vector in range(VECTORS):
            totals[row][vector].add_incoming(zero, entry)
            totals[row][vector].add_incoming(added[row][vector], step)
    write_out(builder, totals, c, ldc, accumulate)
    return function


@intrinsic
def _emit_tile(
    typing_context: Any,
    kind: Any,
    rows: Any,
    spread: Any,
    a: Any,
    b: Any,
    ldb: Any,
    depth: Any,
    c: Any,
    ldc: Any,
    accumulate: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    signature = types.void(
        *[types.intp] * 2, types.boolean, *[types.intp] * 6, types.boolean, *[types.intp] * 2
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, rows, spread, *rest = args
        after = builder.append_basic_block("tiled")
        which = builder.add(builder.mul(kind, int64(2)), builder.zext(spread, I64))
        which = builder.add(builder.mul(which, int64(MAX_ROWS)), rows)
        switch = builder.switch(which, after)
        for number, wide, height in product(range(len(SIZES)), (False, True), range(1, MAX_ROWS + 1)):
            if number == BYTE and wide:
                continue  # only the cache meets rows that lie so, and its bytes are levels
            case = builder.append_basic_block(f"kind{number}{wide:d}rows{height}")
            switch.add_case(int64((2 * number + wide) * MAX_ROWS + height), case)
            with builder.goto_block(case):
                builder.call(_define_tile(builder.module, height, number, wide), rest)
                builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True, cache=True)
def tile(
    kind: int,
    rows: int,
    spread: bool,
    a: int,
    b: int,
    ldb: int,
    depth: int,
    c: int,
    ldc: int,
    accumulate: bool,
    ahead: int,
    ahead_step: int,
) -> None:
    """One tile, computed in float32.

    `kind`: of `b`. `rows`: 1 to MAX_ROWS. `spread`: `a` lies [rows][SPREAD] and not [depth][rows]. `a`, `b`,
    `c`: addresses; `ldb`, `ldc`: elements from one row to the next. `accumulate`: whether the result is added
    to what `c` holds. From `ahead` on, memory is fetched into the cache, `ahead_step` bytes further with each
    step of `depth`: what the next tile will read.
    """
    _emit_tile(kind, rows, spread, a, b, ldb, depth, c, ldc, accumulate, ahead, ahead_step)


def _widen_intrinsic(kind: int) -> Any:
    @intrinsic
    def emit(typing_context: Any, source: Any, target: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, target, depth = args
            scales, weights = _scales(builder, kind, panel)
            index, _, head, _ = loop(builder, depth)
            for vector in range(VECTORS):
                column = builder.add(builder.mul(index, int64(WIDTH)), int64(vector * LANES))
                read = builder.add(weights, builder.mul(column, int64(SIZES[kind])))
                wide = _widened(builder, kind, read, scales[vector])
                store(builder, wide, builder.add(target, builder.mul(column, int64(4))))
            close(builder, index, depth, head)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return emit


widen_half = _widen_intrinsic(HALF)
"""(panel, target, depth): a panel of float16 as one of float32."""
widen_bytes = _widen_intrinsic(BYTE)


@intrinsic
def put_half(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes a float32 as float16; what is too large for it as the largest there is, NaN as NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, value = args
        for sign, relation in ((1.0, ">"), (-1.0, "<")):
            bound = ir.Constant(F32, sign * 65504.0)
            value = builder.select(builder.fcmp_ordered(relation, value, bound), bound, value)
        store(builder, builder.fptrunc(value, F16), address, align=2)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate
