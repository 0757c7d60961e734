"""The Triton kernels against plain torch: interpreted on the CPU, compiled where there is a GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine_worker.attention.paging import DEVICE, assert_equal, expected, make_batch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from engine_worker.attention import kernels
from engine_worker.attention.kernels.prefill import Tiles

ROOT = Path(__file__).resolve().parents[3]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = Tiles(rows=16, tile=16, num_warps=4, num_stages=1)
"""So that a few dozen tokens already need several tiles each way."""


def decode(batch, **options):
    tables, lengths = batch.block_tables, batch.seq_lens
    return kernels.decode_attention(
        batch.query, batch.key_cache, batch.value_cache, tables, lengths, scale=0.3, **options
    )


def prefill(batch, *, tiles=SMALL, **options):
    return kernels.prefill_attention(
        *batch.inputs, max_query_len=batch.max_query_len, scale=0.3, tiles=tiles, **options
    )


# write_kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 96), (3, 64), (8, 128)])
def test_write_kv(dtype, heads, dim):
    caches = torch.full((2, 6, 4, heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    # As attention layers hand them over: heads before tokens.
    key, value = torch.randn(2, heads, 7, dim, device=DEVICE).to(dtype).transpose(1, 2)
    slots = torch.tensor([5, -1, 23, 4, -1, 12, 11], device=DEVICE)
    kernels.write_kv(key, value, *caches, slots)
    for cache, given_ in zip(caches, (key, value), strict=True):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots[slots >= 0]], given_[slots >= 0])
        untouched = [slot for slot in range(24) if slot not in slots.tolist()]
        assert flat[untouched].isnan().all(), "a padded token was written somewhere"


def test_write_kv_refuses_what_does_not_fit():
    cache = torch.zeros(2, 4, 2, 16)
    key = torch.zeros(3, 2, 16)
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.write_kv(key[:, :1], key[:, :1], cache, cache, slots)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.write_kv(key, key, cache.transpose(1, 2).contiguous().transpose(1, 2), cache, slots)


# decode


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (14, 2)])
def test_decode_gqa(dtype, heads, kv_heads):
    batch = make_batch([(1, 21), (1, 1), (1, 16)], heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert_equal(decode(batch, tile=16, num_splits=2), expected(batch, 0.3))


@pytest.mark.parametrize("block_size", [4, 16, 32, 64])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_around_block_and_tile_borders(block_size, num_splits):
    lengths = [1, *(n + d for n in (block_size, 32) for d in (-1, 0, 1))]
    batch = make_batch([(1, n) for n in lengths], heads=2, kv_heads=1, block_size=block_size)
    assert_equal(decode(batch, tile=16, num_splits=num_splits), expected(batch, 0.3))


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 256])
def test_decode_head_dims(dim):
    batch = make_batch([(1, 35), (1, 6)], dim=dim, dtype=torch.float16, block_size=16)
    assert_equal(decode(batch, num_splits=2), expected(batch, 0.3))


@pytest.mark.parametrize("window", [1, 3, 4, 16, 17, 40])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_decode_window_and_softcap(window, softcap):
    batch = make_batch([(1, 5), (1, 33), (1, 16)])
    # Blocks that have left the window may have gone to others, or to scratch.
    for row, length in enumerate(batch.seq_lens.tolist()):
        batch.block_tables[row, : max(0, length - window) // 4] = 0
    reference = make_batch([(1, 5), (1, 33), (1, 16)])
    options = {"sliding_window": window, "softcap": softcap}
    assert_equal(decode(batch, tile=16, num_splits=2, **options), expected(reference, 0.3, **options))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_fault_34_padded_rows_are_zero_though_scratch_holds_nan(num_splits):
    batch = make_batch([(1, 9), (1, 0), (1, 4), (1, 0)])
    assert batch.key_cache[0].isnan().all()
    out = decode(batch, tile=16, num_splits=num_splits)
    assert (out[1] == 0).all()
    assert (out[3] == 0).all()
    assert_equal(out, expected(batch, 0.3))


# prefill


@pytest.mark.parametrize("offset", range(18))
def test_prefill_chunk_at_every_offset(offset):
    batch = make_batch([(7, offset + 7), (1, offset + 1)], heads=2, kv_heads=1)
    assert_equal(prefill(batch), expected(batch, 0.3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (20, 1)])
def test_prefill_gqa(dtype, heads, kv_heads):
    batch = make_batch([(19, 19), (3, 20)], heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert_equal(prefill(batch), expected(batch, 0.3))


@pytest.mark.parametrize("block_size", [4, 16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_with_the_tiles_of_a_gpu(block_size, dtype):
    batch = make_batch([(65, 65), (40, 70)], heads=2, kv_heads=2, block_size=block_size, dtype=dtype)
    assert_equal(prefill(batch, tiles=None), expected(batch, 0.3))


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 256])
def test_prefill_head_dims(dim):
    batch = make_batch([(18, 18), (5, 21)], dim=dim, dtype=torch.float16)
    assert_equal(prefill(batch), expected(batch, 0.3))


@pytest.mark.parametrize("window", [1, 3, 16, 17])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_prefill_window_and_softcap(window, softcap):
    lengths = [(20, 37), (6, 6)]
    batch = make_batch(lengths, heads=2)
    batch.block_tables[0, : max(0, 17 - window + 1) // 4] = 0
    options = {"sliding_window": window, "softcap": softcap}
    assert_equal(prefill(batch, **options), expected(make_batch(lengths, heads=2), 0.3, **options))


def test_prefill_padding_is_zero():
    batch = make_batch([(3, 0), (5, 9), (0, 0), (0, 8), (1, 0)], tail=4)
    out = prefill(batch)
    assert (out[:3] == 0).all()
    assert (out[-5:] == 0).all()
    assert_equal(out, expected(batch, 0.3))


# both


def test_packed_projections_are_read_in_place():
    """Queries as a slice of a fused projection, whose rows are further apart than they are long."""
    batch = make_batch([(5, 12)])
    fused = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)
    want = expected(batch, 0.3)
    batch.query = fused[:, :4]
    assert_equal(prefill(batch), want)


def test_huge_scores_do_not_overflow():
    batch = make_batch([(1, 9), (1, 20)])
    batch.query *= 1e4
    assert_equal(decode(batch), expected(batch, 0.3))
    assert_equal(decode(batch, softcap=2.0), expected(batch, 0.3, softcap=2.0))


def test_refusals():
    batch = make_batch([(1, 3)])
    with pytest.raises(ValueError, match="multiple"):
        kernels.decode_attention(batch.query[:, :3], *batch.inputs[1:4], batch.seq_lens, scale=1.0)
    with pytest.raises(ValueError, match="window"):
        decode(batch, sliding_window=0)


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_triton_the_engine_works_and_the_kernels_say_what_is_missing():
    done = _python(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "import engine_worker.attention.cpu; print('fine')\n"
        "import engine_worker.attention.kernels",
    )
    assert done.stdout == "fine\n"
    assert "need the package 'triton'" in done.stderr


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="Triton brings no assembler here")
def test_kernels_compile_and_fit_into_the_shared_memory_of_small_gpus(tmp_path):
    done = _python(
        "-m",
        "tests.engine_worker.attention.compile_for_gpu",
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert {"join", "write", "decode-80-256x2", "prefill-90-128x4", "prefill-80-96x7"} < set(sizes)
    assert all(int(size) <= 99 * 1024 for size in sizes.values()), sizes
