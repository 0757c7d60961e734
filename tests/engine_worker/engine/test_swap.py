"""Preempted sequences whose blocks wait in host memory: the same tokens, and nothing computed twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_worker.engine.build import build
from engine_worker.engine.errors import EngineDead
from engine_worker.engine.swap import HostBlocks
from tests.engine_worker.driving import Driver, request

ASKED = [request(str(i), [i + 1, 2, 3], 40, temperature=0.7, seed=i, logprobs=1) for i in range(4)]


def always_pays(driver: Driver) -> None:
    """Whatever was measured: of a model this small either may be faster."""
    if driver.core._scheduler._host is not None:
        driver.core._scheduler._host._block_s = 0.0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_fault_05_swapped_and_recomputed_give_what_nobody_preempted_gives(tiny_config, kernels, overlap):
    config = replace(tiny_config, kernels=kernels, prefix_cache=False, overlap=overlap)
    free, swapped, recomputed = (
        Driver(build(replace(config, **changes)))
        for changes in ({}, {"num_kv_blocks": 19}, {"num_kv_blocks": 19, "swap_memory": 0})
    )
    expected = free.run(ASKED)
    for driver in (swapped, recomputed):
        always_pays(driver)
        results = driver.run(ASKED)
        assert driver.core.stats().preemptions > 0
        for name, result in expected.items():
            assert results[name].token_ids == result.token_ids
            assert results[name].text == result.text
        driver.core.device.close()
    assert recomputed.core.stats().swapped_blocks == free.core.stats().swapped_blocks == 0
    assert swapped.core.stats().swapped_blocks > 0
    # Each token is computed once: prompt and output, the last one but its sampling.
    useful = 4 * (3 + 40 - 1)
    assert swapped.core.meter.scheduled_tokens - swapped.core.meter.wasted_tokens == useful
    assert recomputed.core.meter.scheduled_tokens > useful
    free.core.device.close()


def test_a_sequence_that_ends_while_it_is_swapped_out_leaves_nothing(build_tiny):
    driver = Driver(build_tiny(num_kv_blocks=12, prefix_cache=False))
    always_pays(driver)
    low = driver.add(request("low", [1, 2, 3], 30, priority=(1, 0.0)))
    for _ in range(8):
        driver.step()
    driver.add(request("high", [4] * 30, 10))
    driver.step()
    host = driver.core._scheduler._host
    assert host.used == 3  # of its 3 + 7 computed tokens
    driver.core.abort(low)
    assert host.used == 0
    assert driver.run()["high"].finish.completion_tokens == 10


def test_what_is_cheaper_is_measured():
    host = HostBlocks(10, block_size=4, copy_s=0.010)
    assert len(host.take(3)) == 3  # nobody knows yet
    host.note_prompt(0.400, 100)  # 4 ms a token, 16 ms a block; two copies are 20 ms
    assert host.take(3) == []
    host.note_prompt(4.0, 100)
    assert host.take(3) == [3, 4, 5]
    assert host.take(5) == [], "all or nothing"
    host.give_back([3, 4, 5, 0])
    assert (host.used, host.take(1)) == (2, [0])


def test_a_copy_that_fails_is_nobodys_fault(build_tiny):
    driver = Driver(build_tiny(num_kv_blocks=19))
    always_pays(driver)
    runner = driver.core.device.executor.runner

    def fails(moves: object) -> None:
        raise torch.OutOfMemoryError("no")

    runner.move = fails
    with pytest.raises(EngineDead, match="copying KV blocks"):
        driver.run(ASKED)
