"""A model with random weights that computes steps of a fixed batch, as the engine would have it compute them.

Prompts go in as packed chunks, laid out by the host. Decoding needs no host: the chosen token, its
position and its slot are computed on the device, so that a whole step, sampling included, is one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine_worker.attention import interface
from engine_worker.attention.cuda import Layout, PagedAttention, PagedPlan
from engine_worker.attention.interface import PLAN, KVShape, Segment


def random_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    interface.register()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=interface.IMPLEMENTATION
        )
    return model.to(device).eval()


class Stepper:
    """`rows` sequences with room for `room` tokens each. Row i holds blocks of its own from the start."""

    def __init__(self, model: torch.nn.Module, *, rows: int, room: int, block_size: int) -> None:
        config = model.config
        weight = next(model.parameters())
        self.model, self.rows, self.device = model, rows, weight.device
        per_row = -(-room // block_size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = KVShape(
            config.num_hidden_layers, 1 + rows * per_row, config.num_key_value_heads, block_size, head_dim
        )
        self.attention = PagedAttention(
            shape, weight.dtype, self.device, num_heads=config.num_attention_heads
        )
        self.blocks = [range(1 + row * per_row, 1 + (row + 1) * per_row) for row in range(rows)]
        self.ids = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        """The token of each row that the next decode step takes."""
        self._positions = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        tables = torch.tensor([list(blocks) for blocks in self.blocks], dtype=torch.int32, device=self.device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._layout = Layout(
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=per_row * block_size,
            slots=torch.zeros(rows, dtype=torch.int32, device=self.device),
            block_tables=tables,
            query_starts=starts,
            prefill_starts=torch.zeros(1, dtype=torch.int32, device=self.device),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=self.device),
            context_starts=torch.zeros_like(starts),
        )
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def compute(self, chunks: Sequence[tuple[int, int, Tensor]]) -> Tensor:
        """One packed step. `chunks`: (row, tokens computed before, int64[new tokens]), single tokens first.

        Returns int64[chunks]: the likeliest token after each.
        """
        segments, last, positions = [], [], []
        start = 0
        for row, before, tokens in chunks:
            segments.append(Segment(start, len(tokens), before + len(tokens), self.blocks[row]))
            positions.append(torch.arange(before, before + len(tokens)))
            start += len(tokens)
            last.append(start - 1)
        return self._forward(
            torch.cat([tokens for _, _, tokens in chunks])[None],
            torch.cat(positions)[None].to(self.device, non_blocking=True),
            self.attention.plan(segments),
            torch.tensor(last, device=self.device),
        )

    def start_decoding(self, computed: int, ids: Tensor) -> None:
        """Every row has `computed` tokens in the cache and goes on with its token of `ids`, int64[rows]."""
        self.ids.copy_(ids[None])
        self._positions.fill_(computed)

    def decode(self) -> None:
        """One step of every row. After it, `ids` holds what was chosen."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._decode()

    def capture(self) -> None:
        """Turns the decode step into a graph. What `start_decoding` set is used up by the steps that warm it up."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._decode()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        self._graph = graph

    @torch.inference_mode()
    def _decode(self) -> None:
        layout, size = self._layout, self.attention.shape.block_size
        position = self._positions[0]
        block = layout.block_tables.gather(1, (position // size)[:, None])[:, 0]
        layout.slots.copy_(block * size + position % size)
        layout.seq_lens.copy_(position + 1)
        layout.context_starts[1:] = layout.seq_lens.cumsum(0)
        plan = PagedPlan(self.attention, layout)
        self.ids.copy_(self._forward(self.ids, self._positions, plan, layout.query_starts[:-1])[None])
        self._positions += 1

    def _forward(self, ids: Tensor, positions: Tensor, plan: PagedPlan, keep: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep.long(), **{PLAN: plan}
        )
        return output.logits[0].argmax(-1)
