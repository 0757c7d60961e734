"""Memory at an address, as numba sees it: kernels pass addresses, which cost nothing to hand on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        result = types.CPointer(kind)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.intp), generate

    return pointer


_float_pointer = _pointer_to(types.float32)
_int_pointer = _pointer_to(types.int64)
_byte_pointer = _pointer_to(types.int8)


@njit(nogil=True)
def floats(address: int, count: int) -> Any:
    """float32[count] at `address`."""
    return carray(_float_pointer(address), (count,))


@njit(nogil=True)
def ints(address: int, count: int) -> Any:
    """int64[count] at `address`."""
    return carray(_int_pointer(address), (count,))


@njit(nogil=True)
def int8s(address: int, count: int) -> Any:
    """int8[count] at `address`."""
    return carray(_byte_pointer(address), (count,))


def record(*names: str) -> np.dtype[Any]:
    """Of int64 numbers by name: counts and addresses."""
    return np.dtype([(name, np.int64) for name in names])


def record_reader(dtype: np.dtype[Any]) -> Any:
    """A function from (address, count) to the records of `dtype` there."""
    pointer = _pointer_to(from_dtype(dtype))

    @njit(nogil=True)
    def records(address: int, count: int) -> Any:
        return carray(pointer(address), (count,))

    return records
