"""How much of a GPU's memory is left for keys and values."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from engine_worker.attention.interface import KVShape, Segment
from engine_worker.config import EngineConfig
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.runner import group
from engine_worker.runner.gpu_decoder import GpuDecoder
from engine_worker.runner.model_loader import GPU_DTYPES, LoadedModel


def blocks_that_fit(*, total: int, utilization: float, peak: int, block_bytes: int) -> int:
    """KV blocks beside everything else. `peak`: bytes in use at the most of the largest step, without a cache."""
    return max(0, int(total * utilization) - peak) // block_bytes


@torch.inference_mode()
def free_blocks(config: EngineConfig, loaded: LoadedModel, shape: KVShape) -> int:
    """KV blocks that the GPU has room for beside the largest steps, which are tried. Raises UnsupportedModel."""
    device = torch.device(config.device)
    block_bytes = shape.block_bytes(GPU_DTYPES[config.precision])
    tokens = min(config.max_num_batched_tokens, loaded.context_length)
    needed = 1 + -(-tokens // shape.block_size)
    trial = GpuDecoder(config, loaded, replace(shape, num_blocks=needed))
    chunk = Segment(0, tokens, tokens, range(1, needed))
    # With as many rows of logits as are ever asked for.
    trial.forward([0] * tokens, range(tokens), [chunk], [tokens - 1] * config.max_num_seqs)
    trial.warm_largest()
    torch.cuda.synchronize(device)
    # What the device lacks, and not what tensors hold: graphs, libraries and the context itself count as well.
    free, total = torch.cuda.mem_get_info(device)
    del trial
    gc.collect()  # graphs and what they compute in hold each other
    torch.cuda.empty_cache()
    count = blocks_that_fit(
        total=total,
        utilization=config.gpu_memory_utilization,
        peak=total - free - needed * block_bytes,
        block_bytes=block_bytes,
    )
    if count < 2:
        raise UnsupportedModel(
            f"the model leaves no room for a KV cache in {config.gpu_memory_utilization:.0%} of "
            f"{total >> 20} MiB of {config.device}"
        )
    return group.least(count)
