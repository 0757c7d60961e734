"""One step on the device: scheduled tokens in, logits of the sampled positions out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.attention.interface import KVShape, zeroed
from engine_worker.config import EngineConfig
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.swap import Move
from engine_worker.runner import group
from engine_worker.runner.decoder import Decoder, cache_dtype, make_decoder
from engine_worker.runner.model_loader import LoadedModel
from engine_worker.runner.packing import pack


class ModelRunner:
    """Holds the model and its KV cache. Belongs to one thread."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        if config.device != "cpu" and not torch.cuda.is_available():
            raise UnsupportedModel(f"device {config.device!r}: torch finds no CUDA device here")
        self._block_size = config.block_size
        self.num_blocks = _num_blocks(config, loaded)
        self._decoder = make_decoder(config, loaded, _kv_shape(config, loaded, self.num_blocks))
        caches = self._decoder.caches
        # Where several processes share the model each would have to copy its part: not yet.
        block_bytes = sum(cache[:, 0].nbytes for cache in caches)
        self.num_host_blocks = config.swap_memory // block_bytes if group.size() == 1 else 0
        self._host = [_host_copy(cache, self.num_host_blocks) for cache in caches]

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @torch.inference_mode()
    def execute(self, step: Sequence[Scheduled]) -> Tensor:
        """Computes all scheduled tokens. Returns float32[sum of num_logits, vocab], in the step's order.

        Running the same step again gives the same cache and logits: that is what recovery relies on.
        """
        packed = pack(step, self._block_size)
        return self._decoder.forward(packed.token_ids, packed.positions, packed.segments, packed.sampled)

    def move(self, moves: Sequence[Move]) -> None:
        """Copies KV blocks to host memory and back, in order."""
        for move in moves:
            device, host = torch.tensor(move.device), torch.tensor(move.host)
            for cache, copy in zip(self._decoder.caches, self._host, strict=True):
                if move.to_host:
                    copy[:, host] = cache[:, device].to(copy.device)
                else:
                    cache[:, device] = copy[:, host].to(cache.device)

    def seconds_per_move(self) -> float:
        """Of one block, one way, measured on the scratch block."""
        times = []
        for _ in range(5):  # the first maps the memory, and any may be held up
            began = time.perf_counter()
            self.move([Move(to_host=True, device=[0], host=[0])])
            times.append(time.perf_counter() - began)
        return min(times)

    def follow(self) -> None:
        """Computes what the first process of the group tells, until it closes."""
        group.follow(self._decoder)

    def close(self) -> None:
        """Nothing will be computed any more."""
        if isinstance(self._decoder, group.Leader):
            self._decoder.close()

    def scrub(self, blocks: Sequence[int]) -> None:
        self._decoder.scrub(blocks)


def _kv_shape(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> KVShape:
    return KVShape(
        num_layers=loaded.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=loaded.num_kv_heads,
        block_size=config.block_size,
        head_dim=loaded.head_dim,
    )


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.device != "cpu":
        # Here and not above: Triton exists for Linux only.
        from engine_worker.runner.gpu_memory import free_blocks

        return free_blocks(config, loaded, _kv_shape(config, loaded, 1))
    per_block = _kv_shape(config, loaded, 1).block_bytes(cache_dtype(config, loaded))
    return max(2, config.kv_cache_memory // per_block)


def _host_copy(cache: Tensor, num_blocks: int) -> Tensor:
    """Room on the host for so many blocks of `cache`, [layers, blocks, ...]."""
    shape = (len(cache), num_blocks, *cache.shape[2:])
    if cache.device.type == "cpu":
        return zeroed(*shape, dtype=cache.dtype)
    return torch.zeros(shape, dtype=cache.dtype, pin_memory=True)
