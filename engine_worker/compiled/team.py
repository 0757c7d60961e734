"""Threads that run one function together: torch's own OpenMP team.

A second team beside it would fight it for the cores: idle OpenMP threads spin for a while before
they sleep. `GOMP_parallel` is the entry point that GCC's own code calls (libgomp ABI, "GNU
Offloading and Multi Processing Runtime Library", chapter 12).

The barrier is our own. OpenMP's puts threads to sleep at once when a process has more of them than
cores, whatever they do, and waking one takes longer than most stages between two barriers.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import torch
from llvmlite import binding, ir
from numba import njit, types
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
    "weir_parallel": "GOMP_parallel",
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


def _extern(name: str) -> Any:
    @intrinsic
    def call(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.sext(builder.call(function, []), ir.IntType(64))

        return types.intp(), generate

    return call


thread_number = _extern("weir_thread")
thread_count = _extern("weir_threads")
_yield = _extern("sched_yield")


@intrinsic
def take(typing_context: Any, counter: Any, count: Any) -> Any:
    """Adds `count` to the int64 at address `counter`, atomically; returns what it held before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter, count = args
        pointer = builder.inttoptr(counter, ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, count, "monotonic")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _read(typing_context: Any, counter: Any) -> Any:
    """The int64 at an address; what other threads wrote before they added to it is seen after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.intp(types.intp), generate


@intrinsic
def _arrive(typing_context: Any, counter: Any) -> Any:
    """Adds 1 to the int64 at an address, after everything this thread wrote; returns what it held."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.intp(types.intp), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tells the core that this is a wait in a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if binding.get_default_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def clock(typing_context: Any) -> Any:
    """The processor's cycle counter."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.intp(), generate


_PATIENCE: Final = 2000
"""Turns, about 50 us, to wait at full speed: longer, and the others have lost their cores to somebody."""


@njit(nogil=True)
def barrier(arrived: int, threads: int) -> None:
    """Waits until all threads of the team are here. `arrived`: address of an int64 that only barriers touch."""
    awaited = (_arrive(arrived) // threads + 1) * threads
    turns = 0
    while _read(arrived) < awaited:
        if turns < _PATIENCE:
            turns += 1
            _pause()
        else:
            _yield()
