"""The GPU's decoder on its CPU twin: late copies, graphs by batch size, padded rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.runner.streams import RING, HostStreams, Ring
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import make_tiny_model

pytest.importorskip("triton", reason="Triton exists for Linux only")

from engine_worker.runner.gpu_decoder import GpuDecoder, blocks_that_fit, buckets
from engine_worker.runner.model_loader import load


class Careless(Ring):
    """The control: writes its buffers again without waiting for their copies."""

    def upload(self, values, target) -> None:
        self._copies = [None] * len(self._copies)
        super().upload(values, target)


@pytest.mark.parametrize(("kind", "is_right"), [(Ring, True), (Careless, False)])
def test_fault_35_a_buffer_is_not_written_before_its_copy_has_ended(kind, is_right):
    streams = HostStreams()
    ring = kind(streams, 8)
    targets = [torch.zeros(8, dtype=torch.int32) for _ in range(4 * RING)]
    for number, target in enumerate(targets):
        ring.upload(np.full(5, number + 1, np.int32), target)
    streams.settle()
    right = [target.tolist() == [number + 1] * 5 + [0] * 3 for number, target in enumerate(targets)]
    assert all(right) is is_right


def test_graphs_are_few_and_waste_little():
    for most in (1, 5, 8, 64, 256):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            taken = next(size for size in sizes if size >= rows)
            assert taken - rows <= max(1, rows // 4 + 1) or rows < 8
    assert len(buckets(256)) < 24


def test_the_cache_gets_what_the_rest_leaves():
    assert blocks_that_fit(total=1000, utilization=0.9, peak=400, block_bytes=70) == 7
    assert blocks_that_fit(total=1000, utilization=0.3, peak=400, block_bytes=70) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")
def test_fault_34_the_engine_gives_the_same_tokens_through_padded_graphs(tmp_path):
    asked = [request(str(i), [i + 1] * n, 4 + i) for i, n in enumerate((1, 4, 9))]
    config = EngineConfig(
        model_dir=make_tiny_model(tmp_path),
        block_size=4,
        num_kv_blocks=20,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        max_model_len=24,
        threads=1,
        kernels="torch",
        precision="fp32",
    )
    want = run_tokens(build(config), *asked)
    for overlap in (False, True):
        built = build(replace(config, overlap=overlap))
        runner = built.core.device.executor.runner
        decoder = GpuDecoder(config, load(config.model_dir), runner._decoder._attention.shape)
        decoder.keys[:, 0] = decoder.values[:, 0] = torch.nan  # what padded rows read
        runner._decoder = decoder
        driver = Driver(built)
        results = driver.run(asked)
        assert [results[item.request_id].token_ids for item in asked] == want
        assert decoder._streams.captured == len(decoder._graphs) >= 2
        assert 4 in decoder._graphs, "three sequences ran as four rows"
        built.core.device.close()


def test_settings_that_a_gpu_can_not_serve_are_named(tmp_path):
    for changes in ({"precision": "int8"}, {"adapters": "a=/x"}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=r"GPU|device"):
            EngineConfig(**{"model_dir": tmp_path, "device": "cuda", **changes})
