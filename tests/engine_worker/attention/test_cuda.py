"""The GPU's attention behind the engine's interface: interpreted on CPU tensors where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_worker.attention.interface import KVShape, Scoring, Segment
from tests.engine_worker.attention.paging import DEVICE

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
    """The project's own kernels pass it; one that forgets to scale, to cap or its window does not."""
    device = torch.device(DEVICE)
    triton = cuda.KERNELS["triton"]
    assert cuda.worst_error(triton, num_heads, SHAPE, torch.float32, device) < 1e-5
    gemma = Scoring(0.5, window=4096, softcap=0.4)
    assert cuda.worst_error(triton, num_heads, SHAPE, torch.float32, device, gemma) < 1e-5
    for forgotten in ({"scale": 1.0}, {"window": None}, {"softcap": None}):

        def forgetful(query, keys, values, layout, scoring, forgotten=forgotten):
            return triton(query, keys, values, layout, replace(scoring, **forgotten))

        error = cuda.worst_error(forgetful, num_heads, SHAPE, torch.float32, device, gemma)
        assert error > cuda.TOLERANCE, forgotten


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU another kernel may be the right choice")
def test_without_a_gpu_the_choice_is_triton():
    assert cuda.choose(4, SHAPE, torch.float32, torch.device("cpu"))[0] == "triton"


def test_scrub_makes_blocks_usable_again():
    backend = cuda.PagedAttention(SHAPE, torch.float32, torch.device(DEVICE), num_heads=4)
    backend.keys[:, [3, 4]] = backend.values[:, [3, 4]] = torch.nan
    backend.scrub([3, 4])
    assert not backend.keys.isnan().any()
    assert not backend.values.isnan().any()
