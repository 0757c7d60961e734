"""The forward pass on a GPU: `transformers`' modules on paged attention, decode steps as graphs.

A step's numbers go up in one copy. A step of single tokens runs as a graph captured for its batch size,
rounded up; the rows that fill it up read and write the scratch block, and their logits are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_worker.attention.cuda import Layout, PagedAttention, PagedPlan
from engine_worker.attention.interface import PLAN, KVShape, Scoring, Segment
from engine_worker.config import EngineConfig
from engine_worker.engine.types import UnsupportedModel
from engine_worker.runner import group
from engine_worker.runner.model_loader import GPU_DTYPES, LoadedModel
from engine_worker.runner.streams import CudaStreams, HostStreams, Ring, Streams

log = structlog.get_logger(__name__)


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, and then in steps that waste an eighth of the rows at most."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += max(1, size // 4) if size >= 8 else size
    return [*sizes, max_num_seqs]


def blocks_that_fit(*, total: int, utilization: float, peak: int, block_bytes: int) -> int:
    """KV blocks beside everything else. `peak`: bytes in use at the most of the largest step, without a cache."""
    return max(0, int(total * utilization) - peak) // block_bytes


class GpuDecoder:
    """See `decoder.Decoder`. `device` cpu: the twin that tests run."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, shape: KVShape) -> None:
        self._device = torch.device(config.device)
        dtype = GPU_DTYPES[config.precision]
        model: nn.Module = loaded.model
        self._model = model if group.size() > 1 else model.to(self._device, dtype)
        heads = group.share(loaded.model.config.num_attention_heads, "heads")
        self._attention = PagedAttention(
            shape, dtype, self._device, num_heads=heads, scorings=scorings(loaded)
        )
        self.keys, self.values = self._attention.keys, self._attention.values
        self._streams: Streams = CudaStreams(self._device) if self._device.type == "cuda" else HostStreams()
        longest = min(config.max_model_len or loaded.context_length, loaded.context_length)
        self._blocks = -(-longest // shape.block_size)
        self._sizes = buckets(config.max_num_seqs)
        size = _size(config.max_num_seqs, self._blocks)
        self._ring = Ring(self._streams, size)
        # All graphs read and write the same: only one runs at a time.
        self._numbers = torch.zeros(size, dtype=torch.int32, device=self._device)
        width = loaded.model.config.vocab_size
        self._logits = torch.zeros(config.max_num_seqs, width, dtype=torch.float32, device=self._device)
        self._graphs: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
    ) -> Tensor:
        """Logits, float32[len(sampled), vocabulary], on the device, in the order of `sampled`."""
        if all(segment.num_tokens == 1 for segment in segments) and len(sampled) == len(segments):
            logits = self._decode(token_ids, positions, segments)
            return logits if list(sampled) == list(range(len(segments))) else logits[self._index(sampled)]
        plan = self._attention.plan(segments)
        numbers = torch.tensor([token_ids, positions]).to(self._device, non_blocking=True)
        return self._run(numbers[:1], numbers[1:], plan, self._index(sampled))

    def scrub(self, blocks: Sequence[int]) -> None:
        self._attention.scrub(blocks)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(self._device, non_blocking=True)

    def _decode(
        self, token_ids: Sequence[int], positions: Sequence[int], segments: Sequence[Segment]
    ) -> Tensor:
        """Logits of every row; valid until the next call."""
        rows = next(size for size in self._sizes if size >= len(segments))
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows)
        packed = _pack(token_ids, positions, segments, rows, self._blocks, self._attention.shape.block_size)
        self._ring.upload(packed, self._numbers)
        self._streams.settle()
        self._graphs[rows]()
        return self._logits[: len(segments)]

    def _capture(self, rows: int) -> Callable[[], None]:
        """A decode step of so many rows, from the numbers that are uploaded to the logits."""
        numbers = self._numbers[: _size(rows, self._blocks)].zero_()
        parts = torch.split(numbers, [rows] * 4 + [rows + 1, rows * self._blocks])
        ids, positions, slots, lengths, starts, tables = parts
        layout = Layout(
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=self._blocks * self._attention.shape.block_size,
            slots=slots,
            block_tables=tables.view(rows, self._blocks),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self._device),
            prefill_starts=torch.zeros(1, dtype=torch.int32, device=self._device),
            seq_lens=lengths,
            context_starts=starts,
        )
        plan, keep = PagedPlan(self._attention, layout), torch.arange(rows, device=self._device)
        lengths.fill_(1)

        def run() -> None:
            self._logits[:rows].copy_(self._run(ids[None].long(), positions[None].long(), plan, keep))

        log.info("gpu.graph", rows=rows)
        return self._streams.capture(run)

    def _run(self, ids: Tensor, positions: Tensor, plan: PagedPlan, keep: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, **{PLAN: plan}
        )
        logits: Tensor = output.logits[0].float()
        return logits


def _size(rows: int, blocks: int) -> int:
    return rows * (4 + blocks) + rows + 1


def _pack(
    token_ids: Sequence[int],
    positions: Sequence[int],
    segments: Sequence[Segment],
    rows: int,
    blocks: int,
    block_size: int,
) -> NDArray[np.int32]:
    """A decode step as one array: ids, positions, slots, lengths, context starts, block tables.

    Rows beyond the segments are one token long, at the beginning of the scratch block.
    """
    n = len(segments)
    head = np.zeros((4, rows), np.int32)
    head[3] = 1
    head[0, :n], head[1, :n] = token_ids, positions
    tables = np.zeros((rows, blocks), np.int32)
    for row, segment in enumerate(segments):
        used = -(-segment.context_len // block_size)
        tables[row, :used] = segment.blocks[:used]
        last = segment.context_len - 1
        head[2, row] = tables[row, last // block_size] * block_size + last % block_size
        head[3, row] = segment.context_len
    starts = np.concatenate([[0], head[3].cumsum()]).astype(np.int32)
    return np.concatenate([head.reshape(-1), starts, tables.reshape(-1)])


def scorings(loaded: LoadedModel) -> set[Scoring]:
    """Of the model's layers."""
    softcap = getattr(loaded.model.config, "attn_logit_softcapping", None)
    layers = [layer.self_attn for layer in loaded.model.model.layers]
    return {Scoring(float(one.scaling), getattr(one, "sliding_window", None), softcap) for one in layers}


def free_blocks(config: EngineConfig, loaded: LoadedModel, shape: KVShape) -> int:
    """KV blocks that the GPU has room for beside the largest step, which is tried. Raises UnsupportedModel."""
    device = torch.device(config.device)
    block_bytes = shape.block_bytes(GPU_DTYPES[config.precision])
    torch.cuda.reset_peak_memory_stats(device)
    tokens = min(config.max_num_batched_tokens, loaded.context_length)
    needed = 1 + -(-tokens // shape.block_size)
    trial = GpuDecoder(config, loaded, replace(shape, num_blocks=needed))
    chunk = Segment(0, tokens, tokens, range(1, needed))
    # With as many rows of logits as are ever asked for.
    trial.forward([0] * tokens, range(tokens), [chunk], [tokens - 1] * config.max_num_seqs)
    total = torch.cuda.mem_get_info(device)[1]
    peak = torch.cuda.max_memory_allocated(device) - needed * block_bytes
    del trial
    torch.cuda.empty_cache()
    count = blocks_that_fit(
        total=total, utilization=config.gpu_memory_utilization, peak=peak, block_bytes=block_bytes
    )
    if count < 2:
        raise UnsupportedModel(
            f"the model leaves no room for a KV cache in {config.gpu_memory_utilization:.0%} of "
            f"{total >> 20} MiB of {config.device}"
        )
    return group.least(count)
