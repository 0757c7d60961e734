"""A tile of a matrix product, held in vector registers: what every product here is made of.

    c[rows, WIDTH] (+)= a[rows, depth] b[depth, WIDTH]

`a` lies with its rows innermost, [depth][rows], so that one address walks it; `b` has a row of
WIDTH contiguous numbers per step: float32, float16, or int8 with a scale per column. Per step that
is two loads of `b`, and for each row one broadcast of `a` and two fused multiply-adds: with 12 rows
of two 16-lane registers, 24 accumulators hide the latency of both multiply units. The layout and
the tile are those of BLIS (Van Zee, van de Geijn, "BLIS", ACM TOMS 41(3), 2015).

Written as LLVM instructions because no loop that numba compiles is sure to keep 24 accumulators in
registers. All addresses are plain integers, in bytes.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES: Final = dict(binding.get_host_cpu_features())


def _vector_unit() -> tuple[int, int]:
    """(float32 lanes of a register, rows of a tile that leave registers for operands)."""
    if _FEATURES.get("avx512f"):
        return 16, 12  # 32 registers
    if _FEATURES.get("avx2") and _FEATURES.get("fma") and _FEATURES.get("f16c"):
        return 8, 6  # 16 registers
    if binding.get_default_triple().startswith(("aarch64", "arm64")):
        return 4, 12  # 32 registers
    return 0, 0


LANES, MAX_ROWS = _vector_unit()
"""LANES is 0 where there is no vector unit that this package knows."""
_VECTORS: Final = 2
WIDTH: Final = _VECTORS * LANES
"""Columns of a tile: b's rows are padded to it."""

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_FLOAT = ir.FloatType()
_HALF = ir.HalfType()
_VECTOR = ir.VectorType(_FLOAT, max(LANES, 1))
_LINE: Final = 64  # bytes that a prefetch brings


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align, typ=kind)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _call(builder: Any, name: str, result: Any, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args, fastmath=fastmath)


def _splat(builder: Any, value: Any, kind: Any = _VECTOR) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, kind.count), None))


FLOAT: Final = 0
HALF: Final = 1
BYTE: Final = 2
"""Kinds of weights. A panel of bytes begins with the float32 scales of its WIDTH columns."""
SIZES: Final = (4, 2, 1)
_KINDS: Final = (_FLOAT, _HALF, _I8)


def _widened(builder: Any, kind: int, address: Any, scale: Any) -> Any:
    """LANES weights of a kind as float32; `scale`: those of their columns, for bytes."""
    loaded = _load(builder, address, ir.VectorType(_KINDS[kind], LANES), align=SIZES[kind])
    if kind == HALF:
        return builder.fpext(loaded, _VECTOR)
    if kind == BYTE:
        whole = builder.sext(loaded, ir.VectorType(_I32, LANES))
        return builder.fmul(builder.sitofp(whole, _VECTOR), scale)
    return loaded


def _scales(builder: Any, kind: int, panel: Any) -> tuple[list[Any], Any]:
    """The columns' scales, and the address of the weights behind them."""
    if kind != BYTE:
        return [None] * _VECTORS, panel
    scales = [
        _load(builder, builder.add(panel, _int(4 * LANES * vector)), _VECTOR) for vector in range(_VECTORS)
    ]
    return scales, builder.add(panel, _int(4 * WIDTH))


def _define_tile(module: Any, rows: int, kind: int) -> Any:
    """The machine code of one tile height. Arguments as `tile`'s, without `rows`."""
    name = f"weir_tile_{rows}_{kind}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*[_I64] * 6, _I1, _I64, _I64]), name)
    function.linkage = "linkonce_odr"
    a, b, ldb, depth, c, ldc, accumulate, ahead, ahead_step = function.args
    size = SIZES[kind]
    entry, step, done, add, end = (
        function.append_basic_block(label) for label in ("entry", "step", "done", "add", "end")
    )
    builder = ir.IRBuilder(entry)
    zero = ir.Constant(_VECTOR, None)
    scales, b = _scales(builder, kind, b)
    builder.cbranch(builder.icmp_signed(">", depth, _int(0)), step, done)

    builder.position_at_end(step)
    walking = {"k": _int(0), "a": a, "b": b, "ahead": ahead}
    at = {}
    for label, start in walking.items():
        at[label] = builder.phi(_I64)
        at[label].add_incoming(start, entry)
    sums = [[builder.phi(_VECTOR) for _ in range(_VECTORS)] for _ in range(rows)]
    columns = [
        _widened(builder, kind, builder.add(at["b"], _int(vector * LANES * size)), scales[vector])
        for vector in range(_VECTORS)
    ]
    added = []
    for row in range(rows):
        value = _splat(builder, _load(builder, builder.add(at["a"], _int(4 * row)), _FLOAT))
        added.append(
            [
                _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, value, columns[vector], sums[row][vector])
                for vector in range(_VECTORS)
            ]
        )
    for line in range(-(-WIDTH * size // _LINE)):
        address = builder.inttoptr(builder.add(at["ahead"], _int(_LINE * line)), _I8.as_pointer())
        hints = (ir.Constant(_I32, value) for value in (0, 2, 1))  # a read, to the second level, of data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), address, *hints)
    following = {
        "k": builder.add(at["k"], _int(1)),
        "a": builder.add(at["a"], _int(4 * rows)),
        "b": builder.add(at["b"], builder.mul(ldb, _int(size))),
        "ahead": builder.add(at["ahead"], ahead_step),
    }
    for label, value in following.items():
        at[label].add_incoming(value, step)
    for row in range(rows):
        for vector in range(_VECTORS):
            sums[row][vector].add_incoming(zero, entry)
            sums[row][vector].add_incoming(added[row][vector], step)
    builder.cbranch(builder.icmp_signed("<", following["k"], depth), step, done)

    builder.position_at_end(done)
    totals = [[builder.phi(_VECTOR) for _ in range(_VECTORS)] for _ in range(rows)]
    for row in range(rows):
        for vector in range(_VECTORS):
            totals[row][vector].add_incoming(zero, entry)
            totals[row][vector].add_incoming(added[row][vector], step)
    builder.cbranch(accumulate, add, end)

    def target(row: int, vector: int) -> Any:
        column = builder.add(builder.mul(ldc, _int(row)), _int(vector * LANES))
        return builder.add(c, builder.mul(column, _int(4)))

    # The sum is made before it meets what was there: a residual may be far larger than its terms.
    for block, plus in ((add, True), (end, False)):
        builder.position_at_end(block)
        for row in range(rows):
            for vector in range(_VECTORS):
                address = target(row, vector)
                total = totals[row][vector]
                if plus:
                    total = builder.fadd(_load(builder, address, _VECTOR), total)
                _store(builder, total, address)
        builder.ret_void()
    return function


def _tile_intrinsic(kind: int) -> Any:
    @intrinsic
    def emit(
        typing_context: Any,
        rows: Any,
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
        signature = types.void(*[types.intp] * 7, types.boolean, types.intp, types.intp)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, *rest = args
            after = builder.append_basic_block("tiled")
            switch = builder.switch(rows, after)
            for height in range(1, MAX_ROWS + 1):
                case = builder.append_basic_block(f"rows{height}")
                switch.add_case(_int(height), case)
                with builder.goto_block(case):
                    builder.call(_define_tile(builder.module, height, kind), rest)
                    builder.branch(after)
            builder.position_at_end(after)
            return context.get_dummy_value()

        return signature, generate

    return emit


_emit_tile = _tile_intrinsic(FLOAT)
_emit_half_tile = _tile_intrinsic(HALF)
_emit_byte_tile = _tile_intrinsic(BYTE)


@njit(nogil=True, cache=True)
def tile(
    rows: int,
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
    """One tile, `b` in float32.

    `rows`: 1 to MAX_ROWS. `a`, `b`, `c`: addresses; `ldb`, `ldc`: elements from one row to the next.
    `accumulate`: whether the result is added to what `c` holds. From `ahead` on, memory is fetched into
    the cache, `ahead_step` bytes further with each step of `depth`: what the next tile will read.
    """
    _emit_tile(rows, a, b, ldb, depth, c, ldc, accumulate, ahead, ahead_step)


@njit(nogil=True, cache=True)
def half_tile(
    rows: int,
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
    """One tile, `b` in float16: as `tile`, computed in float32."""
    _emit_half_tile(rows, a, b, ldb, depth, c, ldc, accumulate, ahead, ahead_step)


@njit(nogil=True, cache=True)
def byte_tile(
    rows: int,
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
    """One tile, `b` a panel of bytes: as `tile`, computed in float32."""
    _emit_byte_tile(rows, a, b, ldb, depth, c, ldc, accumulate, ahead, ahead_step)


def _loop(builder: Any, count: Any, carried: Any = None) -> tuple[Any, Any, Any, Any]:
    """Opens a loop over 0 .. count - 1; `_close` ends it. Returns (index, value carried, head, entry)."""
    entry = builder.block
    head = builder.append_basic_block("loop")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_int(0), entry)
    value = None
    if carried is not None:
        value = builder.phi(carried.type)
        value.add_incoming(carried, entry)
    return index, value, head, entry


def _close(builder: Any, index: Any, count: Any, head: Any, value: Any = None, carried: Any = None) -> None:
    following = builder.add(index, _int(1))
    index.add_incoming(following, builder.block)
    if value is not None:
        value.add_incoming(carried, builder.block)
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)


def _widen_intrinsic(kind: int) -> Any:
    @intrinsic
    def emit(typing_context: Any, source: Any, target: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, target, depth = args
            scales, weights = _scales(builder, kind, panel)
            index, _, head, _ = _loop(builder, depth)
            for vector in range(_VECTORS):
                column = builder.add(builder.mul(index, _int(WIDTH)), _int(vector * LANES))
                read = builder.add(weights, builder.mul(column, _int(SIZES[kind])))
                wide = _widened(builder, kind, read, scales[vector])
                _store(builder, wide, builder.add(target, builder.mul(column, _int(4))))
            _close(builder, index, depth, head)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return emit


widen_half = _widen_intrinsic(HALF)
"""(panel, target, depth): a panel of float16 as one of float32."""
widen_bytes = _widen_intrinsic(BYTE)


@intrinsic
def largest(typing_context: Any, row: Any, vectors: Any) -> Any:
    """The largest of `vectors` times LANES float32 at `row`; NaN does not count."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, vectors = args
        least = ir.Constant(_VECTOR, [float("-inf")] * LANES)
        index, value, head, _ = _loop(builder, vectors, least)
        read = _load(builder, builder.add(row, builder.mul(index, _int(4 * LANES))), _VECTOR)
        best = _call(builder, f"llvm.maxnum.v{LANES}f32", _VECTOR, value, read)
        _close(builder, index, vectors, head, value, best)
        return _call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _FLOAT, best)

    return types.float32(types.intp, types.intp), generate


def _exponential(builder: Any, x: Any) -> Any:
    """e^x of a vector, to 2 units in the last place, 0 below -87; NaN stays NaN.

    2^n times a polynomial of the rest, the classic reduction (Cephes' expf).
    """

    def constant(value: float) -> Any:
        return ir.Constant(_VECTOR, [value] * LANES)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, a, b, c)

    tiny = builder.fcmp_ordered("<", x, constant(-87.0))
    bounded = builder.select(tiny, constant(0.0), x)
    large = builder.fcmp_ordered(">", bounded, constant(88.0))
    bounded = builder.select(large, constant(88.0), bounded)
    turns = _call(
        builder, f"llvm.rint.v{LANES}f32", _VECTOR, builder.fmul(bounded, constant(1.44269504088896341))
    )
    rest = fma(turns, constant(-0.693359375), bounded)
    rest = fma(turns, constant(2.12194440e-4), rest)
    value = constant(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = fma(value, rest, constant(term))
    value = fma(value, builder.fmul(rest, rest), builder.fadd(rest, constant(1.0)))
    integers = ir.VectorType(_I32, LANES)
    # NaN to an integer is poison: those lanes take 0 here, their NaN is in `value` already.
    ordered = builder.fcmp_ordered("ord", turns, turns)
    whole = builder.fptosi(builder.select(ordered, turns, constant(0.0)), integers)
    bits = builder.shl(
        builder.add(whole, ir.Constant(integers, [127] * LANES)), ir.Constant(integers, [23] * LANES)
    )
    value = builder.fmul(value, builder.bitcast(bits, _VECTOR))
    return builder.select(tiny, constant(0.0), value)


@intrinsic
def exponentials(typing_context: Any, row: Any, peak: Any, vectors: Any) -> Any:
    """Turns `vectors` times LANES float32 at `row` into e^(x - peak), and returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, peak, vectors = args
        peaks = _splat(builder, peak)
        index, value, head, _ = _loop(builder, vectors, ir.Constant(_VECTOR, None))
        address = builder.add(row, builder.mul(index, _int(4 * LANES)))
        made = _exponential(builder, builder.fsub(_load(builder, address, _VECTOR), peaks))
        _store(builder, made, address)
        total = builder.fadd(value, made)
        _close(builder, index, vectors, head, value, total)
        none = ir.Constant(_FLOAT, -0.0)
        # In any order: from the first lane to the last would be a chain of dependent additions.
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return _call(builder, name, _FLOAT, none, total, fastmath=("reassoc",))

    return types.float32(types.intp, types.float32, types.intp), generate


@intrinsic
def silu_gate(typing_context: Any, gate: Any, up: Any, vectors: Any) -> Any:
    """Turns `gate`, `vectors` times LANES float32, into gate * sigmoid(gate) * up."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, vectors = args
        index, _, head, _ = _loop(builder, vectors)
        offset = builder.mul(index, _int(4 * LANES))
        g = _load(builder, builder.add(gate, offset), _VECTOR)
        u = _load(builder, builder.add(up, offset), _VECTOR)
        one = ir.Constant(_VECTOR, [1.0] * LANES)
        below = builder.fadd(one, _exponential(builder, builder.fneg(g)))
        _store(builder, builder.fmul(builder.fdiv(g, below), u), builder.add(gate, offset))
        _close(builder, index, vectors, head)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate
