"""The whole engine on the GPU's attention, interpreted on CPU tensors."""

from __future__ import annotations

import random

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import make_tiny_model

pytest.importorskip("triton", reason="Triton exists for Linux only")

from engine_worker.attention import cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0})],
    ids=["llama", "gemma2"],
)
def test_engine_gives_the_same_tokens_on_both_backends(tmp_path, family, changes):
    """Chunked prefill, batched decode, preemption: what the whole engine makes of the cache."""
    rng = random.Random(3)
    requests = [
        request(str(i), [rng.randrange(256) for _ in range(n)], 6) for i, n in enumerate((1, 4, 5, 13, 21))
    ]
    config = EngineConfig(
        model_dir=make_tiny_model(tmp_path, family, **changes),
        block_size=4,
        num_kv_blocks=12,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        threads=1,
        kernels="torch",
        precision="fp32",
        swap_memory=0,  # it would copy from the cache of the backend that is replaced below
    )
    want = run_tokens(build(config), *requests)
    built = build(config)
    decoder = built.core.device.executor.runner._decoder
    shape = decoder._attention.shape
    decoder._attention = cuda.PagedAttention(shape, torch.float32, torch.device("cpu"), num_heads=4)
    driver = Driver(built)
    results = driver.run(requests)
    assert [results[item.request_id].token_ids for item in requests] == want
    assert driver.core.stats().preemptions > 0
    assert decoder._attention.keys[:, 1:].any(), "the other backend was asked"
