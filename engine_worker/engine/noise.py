"""Counter-based random numbers: a function of (seed, position), with no state to lose.

A request that is preempted, resumed on another worker or verified out of order draws the same
number for the same output position. Philox4x32-10 of Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3" (SC '11).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10. `counter`: uint64[n, 4] and `key`: uint64[n, 2] hold 32-bit words; so does the result [n, 4]."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(10):
        high = c0 * _MULTIPLIERS[0]
        low = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (low >> _32) ^ c1 ^ k0, low & _LOW, (high >> _32) ^ c3 ^ k1, high & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """float64[n] in [0, 1), one per (seed, position). Seeds count modulo 2**64."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    counter = np.zeros((len(positions), 4), dtype=np.uint64)
    counter[:, 0] = positions
    words = philox(counter, np.stack((seed & _LOW, seed >> _32), axis=1))
    # 53 bits of two words: as many as a float64 holds below 1.
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
