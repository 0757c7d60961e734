"""The GPU's attention behind the engine's interface: interpreted on CPU tensors where there is no GPU."""

from __future__ import annotations

import random

import pytest
import torch

from engine_worker.attention.interface import KVShape, Segment
from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from tests.engine_worker.attention.paging import DEVICE
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import make_tiny_model

pytest.importorskip("triton", reason="Triton exists for Linux only")

from engine_worker.attention import cuda

SHAPE = KVShape(num_layers=2, num_blocks=40, num_kv_heads=2, block_size=4, head_dim=8)


def test_layout():
    segments = [Segment(0, 1, 5, [7, 3]), Segment(1, 1, 4, [2]), Segment(2, 3, 9, [4, 5, 6])]
    layout = cuda.Layout.of(segments, 4, torch.device(DEVICE))
    assert (layout.num_decodes, layout.max_query_len, layout.max_seq_len) == (2, 3, 9)
    assert layout.slots.tolist() == [12, 11, 22, 23, 24]
    assert layout.block_tables.tolist() == [[7, 3, 0], [2, 0, 0], [4, 5, 6]]
    assert layout.query_starts.tolist() == [0, 1, 2, 5]
    assert layout.prefill_starts.tolist() == [0, 3]
    assert layout.seq_lens.tolist() == [5, 4, 9]
    assert layout.context_starts.tolist() == [0, 5, 9, 18]


@pytest.mark.parametrize("num_heads", [2, 6])
def test_the_probe_measures(num_heads):
    """The project's own kernels pass it; one that forgets to scale does not."""
    device = torch.device(DEVICE)
    assert cuda.worst_error(cuda.KERNELS["triton"], num_heads, SHAPE, torch.float32, device) < 1e-5

    def unscaled(query, keys, values, layout, scale):
        return cuda.KERNELS["triton"](query, keys, values, layout, 1.0)

    assert cuda.worst_error(unscaled, num_heads, SHAPE, torch.float32, device) > cuda.TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU another kernel may be the right choice")
def test_without_a_gpu_the_choice_is_triton():
    assert cuda.choose(4, SHAPE, torch.float32, torch.device("cpu"))[0] == "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")
def test_engine_gives_the_same_tokens_on_both_backends(tmp_path):
    """Chunked prefill, batched decode, preemption: what the whole engine makes of the cache."""
    rng = random.Random(3)
    requests = [
        request(str(i), [rng.randrange(256) for _ in range(n)], 6) for i, n in enumerate((1, 4, 5, 13, 21))
    ]
    config = EngineConfig(
        model_dir=make_tiny_model(tmp_path),
        block_size=4,
        num_kv_blocks=12,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        threads=1,
    )
    want = run_tokens(build(config), *requests)
    built = build(config)
    runner = built.core._runner
    shape = runner._attention.shape
    runner._attention = cuda.PagedAttention(shape, torch.float32, torch.device("cpu"), num_heads=4)
    driver = Driver(built)
    results = driver.run(requests)
    assert [results[item.request_id].token_ids for item in requests] == want
    assert driver.core.stats().preemptions > 0
    assert runner._attention.keys[:, 1:].any(), "the other backend was asked"


def test_scrub_makes_blocks_usable_again():
    backend = cuda.PagedAttention(SHAPE, torch.float32, torch.device(DEVICE), num_heads=4)
    backend.keys[:, [3, 4]] = backend.values[:, [3, 4]] = torch.nan
    backend.scrub([3, 4])
    assert not backend.keys.isnan().any()
    assert not backend.values.isnan().any()
