"""Threads that run one function together: torch's own OpenMP team.

A second team beside it would fight it for the cores: idle OpenMP threads spin for a while before
they sleep. `GOMP_parallel` and `GOMP_barrier` are the entry points that GCC's own code calls
(libgomp ABI, "GNU Offloading and Multi Processing Runtime Library", chapter 12).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch computes with, or the system's; None where there is none of GCC's."""
    root = Path(torch.__file__).parent
    bundled = [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    for name in [*map(str, bundled), "libgomp.so.1"]:
        try:
            runtime = ctypes.CDLL(name)
        except OSError:
            continue
        if all(hasattr(runtime, symbol) for symbol in _SYMBOLS.values()):
            return runtime
    return None


_SYMBOLS: Final = {
    "weir_barrier": "GOMP_barrier",
    "weir_thread": "omp_get_thread_num",
    "weir_threads": "omp_get_num_threads",
}
_RUNTIME: Final = _runtime()
AVAILABLE: Final = _RUNTIME is not None
if _RUNTIME is not None:
    for _name, _symbol in _SYMBOLS.items():
        # By name, which a later process binds anew: an address could not be cached with the machine code.
        binding.add_symbol(_name, ctypes.cast(getattr(_RUNTIME, _symbol), ctypes.c_void_p).value or 0)


def run(function: int, data: int, threads: int) -> None:
    """Calls `void function(void *data)`, an address, on `threads` threads at once, and waits for all of them."""
    assert _RUNTIME is not None
    if threads == 1:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)
    else:
        _RUNTIME.GOMP_parallel(
            ctypes.c_void_p(function), ctypes.c_void_p(data), ctypes.c_uint(threads), ctypes.c_uint(0)
        )


def _extern(name: str, result: Any) -> Any:
    @intrinsic
    def call(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VoidType() if result is types.void else ir.IntType(32)
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, []), name)
            value = builder.call(function, [])
            return context.get_dummy_value() if result is types.void else builder.sext(value, ir.IntType(64))

        return result(), generate

    return call


barrier = _extern("weir_barrier", types.void)
"""Waits until all threads of the team are here."""
thread_number = _extern("weir_thread", types.intp)
thread_count = _extern("weir_threads", types.intp)


@intrinsic
def take(typing_context: Any, counter: Any, count: Any) -> Any:
    """Adds `count` to the int64 at address `counter`, atomically; returns what it held before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter, count = args
        pointer = builder.inttoptr(counter, ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, count, "monotonic")

    return types.intp(types.intp, types.intp), generate
