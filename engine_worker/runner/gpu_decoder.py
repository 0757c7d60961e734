"""The forward pass on a GPU, and the choice of tokens behind it: paged attention, graphs, nothing that waits.

A step's numbers go up in one copy while the step before runs. A step of single tokens runs as a graph captured for
its batch size, rounded up; the rows that fill it up read and write the scratch block, and what they give is cut off.
A second graph chooses the tokens. They stay on the device, where the next step takes them from; the host is told by
a copy that holds up neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from engine_worker.attention.cuda import Layout, PagedAttention, PagedPlan
from engine_worker.attention.interface import PLAN, KVShape, Segment
from engine_worker.config import EngineConfig
from engine_worker.runner import group
from engine_worker.runner.decode_numbers import KNOWN, buckets, decode_size, pack_decode
from engine_worker.runner.gpu_sampler import Choosing, Level, Settings, choose, pack, settings_size
from engine_worker.runner.host_streams import HostStreams
from engine_worker.runner.model_loader import GPU_DTYPES, LoadedModel
from engine_worker.runner.rings import BackRing, Ring, Told
from engine_worker.runner.scorings import scorings
from engine_worker.runner.streams import CudaStreams, Streams

log = logging.getLogger(__name__)


class GpuDecoder:
    """See `decoder.Decoder`. `device` cpu: the twin that tests run."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, shape: KVShape, streams: Streams | None = None
    ) -> None:
        self._device = torch.device(config.device)
        if streams is None:
            is_cuda = self._device.type == "cuda"
            streams = CudaStreams(self._device) if is_cuda else HostStreams()
        self._streams = streams
        dtype = GPU_DTYPES[config.precision]
        # Not its dtype: that is as it was loaded, and rotary frequencies stay in float32 whatever it is.
        model: nn.Module = loaded.model
        self._model = model if group.size() > 1 else model.to(self._device)
        of_all = loaded.model.config
        heads = group.share_heads(of_all, of_all.num_attention_heads, "heads")
        self._attention = PagedAttention(
            shape, dtype, self._device, num_heads=heads, scorings=set(scorings(loaded.model))
        )
        self.keys, self.values = self._attention.keys, self._attention.values
        self._tokens = self._zeros(1, shape.num_blocks, shape.block_size)
        """The token cache: int32[1, blocks, block_size], what keys and values are those of."""
        longest = min(config.max_model_len or loaded.context_length, loaded.context_length)
        self._blocks = -(-longest // shape.block_size)
        self._max_rows, self._budget = config.max_num_seqs, config.max_num_batched_tokens
        self._vocab_size = loaded.vocab_size
        self._sizes = buckets(self._max_rows)
        size = max(
            decode_size(self._max_rows, self._blocks),
            5 * config.max_num_batched_tokens + self._max_rows * (self._blocks + 6) + 8,
        )
        self._ring = Ring(streams, size, self._device)
        # All graphs read and write the same: only one runs at a time.
        self._numbers = self._zeros(size)
        choices = settings_size(self._max_rows, self._blocks)
        self._choice_ring = Ring(streams, choices, self._device)
        self._settings = self._zeros(choices)
        width = loaded.model.config.vocab_size
        self._logits = torch.zeros(self._max_rows, width, dtype=torch.float32, device=self._device)
        self._chosen = self._zeros(self._max_rows)
        self._told = BackRing(streams, self._max_rows, self._device)
        # Four dimensions: transformers takes it for a mask that is made already, and makes none itself. Making
        # one asks the device whether several sequences are packed, and waits for its answer.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)
        self.padding_tokens = 0
        """Rows so far that filled graphs up."""
        self._graphs: dict[int, Callable[[], None]] = {}
        self._choice_graphs: dict[tuple[int, Level], Callable[[], None]] = {}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """See `decoder.Decoder`: keys, values and tokens."""
        self._streams.settle()
        return self.keys, self.values, self._tokens

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
    ) -> Tensor:
        """Logits, float32[len(sampled), vocabulary], on the device, in the order of `sampled`."""
        if _is_decode(segments, sampled):
            self.launch(token_ids, positions, segments, sampled, [KNOWN] * len(token_ids))
            self._streams.settle()
            return self._logits[: len(sampled)]
        box: list[Tensor] = []
        self._packed(token_ids, positions, segments, sampled, [KNOWN] * len(token_ids), box.append)
        self._streams.settle()
        return box[0]

    @torch.inference_mode()
    def launch(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        """`forward`, for at most one sampled row per sequence, to be followed by `choose`. Nothing waits.

        `sources`: of each token, `KNOWN` or the row of the last `choose` that chooses it.
        """
        if not sampled:
            self._packed(token_ids, positions, segments, [0], sources, lambda logits: None)
        elif _is_decode(segments, sampled):
            self._decode(token_ids, positions, segments, sources)
        else:
            rows = self._logits[: len(sampled)]
            self._packed(token_ids, positions, segments, sampled, sources, lambda logits: _copy(logits, rows))

    @torch.inference_mode()
    def choose(self, choosing: Sequence[Choosing]) -> Told:
        """The next token of each row of the last `launch`; -1 where there is none. Nothing waits."""
        level = max((one.level for one in choosing), default=Level.GREEDY)
        rows = next(size for size in self._sizes if size >= len(choosing))
        graph = self._choice_graphs.get((rows, level)) or self._capture_choice(rows, level)
        if level > Level.GREEDY:
            packed = pack(choosing, rows, self._blocks, self._vocab_size)
            self._choice_ring.upload(packed, self._settings)
        self._streams.run(graph)
        return self._told.download(self._chosen[: len(choosing)])

    @torch.inference_mode()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """float32[rows, vocabulary] of the last `launch`."""
        self._streams.settle()
        return self._logits[torch.tensor(rows, dtype=torch.int64, device=self._device)]

    @torch.inference_mode()
    def warm(self) -> None:
        """Captures every graph, the largest first, in whose memory the others compute, and compiles what prompts take.

        All of it would otherwise come up while streams wait.
        """
        for rows in reversed(self._sizes):
            self._capture(rows)
            for level in reversed(Level if group.size() == 1 else ()):
                self._capture_choice(rows, level)

        for count in {size for size in (1, 17, 65, 257) if size <= self._max_rows}:
            for tokens in {2, min(self._budget // count, self._attention.shape.block_size)}:
                if count * tokens <= self._budget:
                    self._prompts_of_scratch(count, tokens)

    def _prompts_of_scratch(self, count: int, tokens: int) -> None:
        segments = [Segment(at * tokens, tokens, tokens, [0]) for at in range(count)]
        self.forward([0] * count * tokens, [*range(tokens)] * count, segments, range(count))

    @torch.inference_mode()
    def warm_largest(self) -> None:
        """Captures what takes the most memory."""
        self._capture(self._max_rows)
        self._capture_choice(self._max_rows, Level.SHAPED)

    @torch.inference_mode()
    def scrub(self, blocks: Sequence[int]) -> None:
        self._streams.run(lambda: self._attention.scrub(blocks))

    def _decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sources: Sequence[int],
    ) -> None:
        rows = next(size for size in self._sizes if size >= len(segments))
        graph = self._graphs.get(rows) or self._capture(rows)
        block_size = self._attention.shape.block_size
        packed = pack_decode(token_ids, positions, segments, sources, rows, self._blocks, block_size)
        self._ring.upload(packed, self._numbers)
        self._streams.run(graph)
        self.padding_tokens += rows - len(segments)

    def _packed(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
        sources: Sequence[int],
        then: Callable[[Tensor], None],
    ) -> None:
        """A step of any shape, launched kernel by kernel. `then` gets the logits."""
        layout = Layout.parts(segments, self._attention.shape.block_size)
        parts = [np.array(part, np.int32) for part in (token_ids, positions, sources, sampled)]
        parts += layout.arrays
        packed = np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32)
        self._ring.upload(packed, self._numbers)
        pieces = torch.split(self._numbers[: packed.size], [part.size for part in parts])
        ids, at, origin, keep = pieces[:4]
        plan = PagedPlan(self._attention, layout.on(pieces[4:]))
        self._streams.run(lambda: then(self._run(ids, at, origin, plan, keep.long())))

    def _capture(self, rows: int) -> Callable[[], None]:
        """A decode step of so many rows, from the numbers that are uploaded to the logits."""
        size = decode_size(rows, self._blocks)
        numbers = self._numbers[:size]
        parts = torch.split(numbers, [rows] * 5 + [rows + 1, rows * self._blocks])
        ids, positions, sources, slots, lengths, starts, tables = parts
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
        # Something to compute while it is captured: as many tokens at the beginning of the scratch block.
        self._ring.upload(pack_decode([], [], [], [], rows, self._blocks, 1), self._numbers)

        def run() -> None:
            _copy(self._run(ids, positions, sources, plan, keep), self._logits[:rows])

        log.info("gpu.graph rows=%d", rows)
        self._graphs[rows] = graph = self._streams.capture(run)
        return graph

    def _capture_choice(self, rows: int, level: Level) -> Callable[[], None]:
        """The choice of so many tokens, from logits and settings to `_chosen`."""
        settings = Settings(self._settings, rows, self._blocks)
        self._choice_ring.upload(pack([], rows, self._blocks, self._vocab_size), self._settings)

        def run() -> None:
            logits = self._logits[:rows, : self._vocab_size]
            _copy(choose(logits, settings, self._tokens[0], level), self._chosen[:rows])

        log.info("gpu.choice_graph rows=%d level=%s", rows, level.name)
        self._choice_graphs[rows, level] = graph = self._streams.capture(run)
        return graph

    @torch.inference_mode()
    def _run(self, ids: Tensor, positions: Tensor, sources: Tensor, plan: PagedPlan, keep: Tensor) -> Tensor:
        """float32[len(keep), vocabulary]."""
        before = self._chosen[sources.clamp(min=0).long()].clamp(min=0)
        ids = torch.where(sources >= 0, before, ids)
        self._tokens.view(-1).scatter_(0, plan.layout.slots.long(), ids)
        output = self._model(
            input_ids=ids[None].long(),
            position_ids=positions[None].long(),
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=keep,
            **{PLAN: plan},
        )
        logits: Tensor = output.logits[0].float()
        return logits


def _is_decode(segments: Sequence[Segment], sampled: Sequence[int]) -> bool:
    """Whether it is one token of each sequence, and each is sampled."""
    return all(segment.num_tokens == 1 for segment in segments) and list(sampled) == list(
        range(len(segments))
    )


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
