"""What kernels are written with: LLVM instructions on the vector registers of this processor.

Written so because no loop that numba compiles is sure to keep its sums in registers. All addresses
are plain integers, in bytes.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import binding, ir
from numba import njit
from numba.core import cgutils

FEATURES: Final = dict(binding.get_host_cpu_features())


def _vector_unit() -> tuple[int, int]:
    """(float32 lanes of a register, rows of a tile that leave registers for operands)."""
    if FEATURES.get("avx512f"):
        return 16, 12  # 32 registers
    if FEATURES.get("avx2") and FEATURES.get("fma") and FEATURES.get("f16c"):
        return 8, 6  # 16 registers
    if binding.get_default_triple().startswith(("aarch64", "arm64")):
        return 4, 12  # 32 registers
    return 0, 0


LANES, MAX_ROWS = _vector_unit()
"""LANES is 0 where there is no vector unit that this package knows."""
CONVERTS_BESIDE: Final = binding.get_host_cpu_name() == "znver5"
"""Whether float16 becomes float32 in units that multiply nothing: measured, on a processor that this names."""
VECTORS: Final = 2
WIDTH: Final = VECTORS * LANES
"""Columns of a tile: b's rows are padded to it."""

I1, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
F32 = ir.FloatType()
F16 = ir.HalfType()
VECTOR = ir.VectorType(F32, max(LANES, 1))
LINE: Final = 64  # bytes that a prefetch brings
SUMS: Final = {"reassoc", "contract", "nsz"}
"""What `fastmath` may do to loops of sums: reorder them, so that they are vectorised; NaN stays NaN."""


@njit(nogil=True)
def panels(size: int) -> int:
    """Of WIDTH columns each, the last padded."""
    return (size + WIDTH - 1) // WIDTH


@njit(nogil=True)
def padded(size: int) -> int:
    """`size`, up to a multiple of WIDTH."""
    return panels(size) * WIDTH


def int64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align, typ=kind)


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def call(builder: Any, name: str, result: Any, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args, fastmath=fastmath)


def splat(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, kind.count), None))


def loop(builder: Any, count: Any, carried: Any = None) -> tuple[Any, Any, Any, Any]:
    """Opens a loop over 0 .. count - 1; `close` ends it. Returns (index, value carried, head, entry)."""
    entry = builder.block
    head = builder.append_basic_block("loop")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(int64(0), entry)
    value = None
    if carried is not None:
        value = builder.phi(carried.type)
        value.add_incoming(carried, entry)
    return index, value, head, entry


def close(builder: Any, index: Any, count: Any, head: Any, value: Any = None, carried: Any = None) -> None:
    following = builder.add(index, int64(1))
    index.add_incoming(following, builder.block)
    if value is not None:
        value.add_incoming(carried, builder.block)
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)
