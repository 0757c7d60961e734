"""What a request leaves behind: nothing."""

from __future__ import annotations

import gc
import random

import psutil
import pytest

from tests.engine_worker.driving import Driver, request

_REQUESTS = 10_000


@pytest.mark.timeout(600)
def test_fault_32_memory_is_flat_over_ten_thousand_requests(build_tiny):
    built = build_tiny(num_kv_blocks=129, speculative_tokens=2)
    rng = random.Random(1)
    process = psutil.Process()

    def run(first: int, count: int) -> int:
        for at in range(first, first + count, 8):
            driver = Driver(built)
            driver.run(
                request(str(n), [rng.randrange(256) for _ in range(9)], 3, cache_salt=str(n % 7), logprobs=1)
                for n in range(at, at + 8)
            )
        gc.collect()
        return process.memory_info().rss

    run(0, 1500)
    objects = len(gc.get_objects())  # a list of some megabytes, so it is made before the memory is read
    warm = run(1500, 500)  # the cache is full, the allocator has what it wants
    grown = run(2000, _REQUESTS - 2000) - warm
    # A leak of 200 bytes per request would be 1.6 MB.
    assert grown < 1 << 20
    assert len(gc.get_objects()) - objects < 500
