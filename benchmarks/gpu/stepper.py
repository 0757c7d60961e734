"""The engine's own decoder and sampler, with random weights, driven as the engine's loop drives them.

Each step is launched from Python before the tokens of the one before are known, and its tokens are waited for
after that: what is measured includes what the host has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine_worker.attention import interface
from engine_worker.attention.interface import KVShape, Segment
from engine_worker.config import EngineConfig
from engine_worker.runner.decode_numbers import KNOWN
from engine_worker.runner.gpu_decoder import GpuDecoder
from engine_worker.runner.gpu_sampler import Choosing
from engine_worker.runner.model_loader import LoadedModel
from engine_worker.runner.rings import Told


@dataclass(frozen=True)
class Sampling:
    """What the decoder reads of `protocol.SamplingParams`, which needs msgspec."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 1
    logit_bias: dict[int, float] = field(default_factory=dict)


GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0)
SHAPED = Sampling(temperature=1.0, top_k=200, top_p=0.9, presence_penalty=0.1)


def random_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Any:
    interface.register()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=interface.IMPLEMENTATION
        )
    return model.to(device).eval()


class Stepper:
    """`rows` sequences with room for `room` tokens each. Row i holds blocks of its own from the start."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int,
        room: int,
        block_size: int,
        budget: int = 512,
        sampling: Sampling = GREEDY,
    ) -> None:
        config = model.config
        weight = next(model.parameters())
        self.model, self.rows, self._block_size = model, rows, block_size
        self._sampling: Any = sampling
        per_row = -(-room // block_size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = KVShape(
            config.num_hidden_layers, 1 + rows * per_row, config.num_key_value_heads, block_size, head_dim
        )
        no_tokenizer: Any = None
        loaded = LoadedModel(
            model=model,
            tokenizer=no_tokenizer,
            eos_token_ids=frozenset(),
            vocab_size=config.vocab_size,
            special_token_ids=frozenset(),
            context_length=config.max_position_embeddings,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=head_dim,
        )
        engine = EngineConfig(
            model_dir=Path(),
            device=str(weight.device),
            precision="fp32" if weight.dtype == torch.float32 else "fp16",
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=max(budget, rows),
            max_model_len=room,
        )
        self.decoder = GpuDecoder(engine, loaded, shape)
        self._blocks = [range(1 + row * per_row, 1 + (row + 1) * per_row) for row in range(rows)]
        self._computed = 0
        self._ids: list[int] | None = None
        """The tokens that the next decode step begins with; None: those that the last one chose."""

    @property
    def attention(self) -> str:
        return self.decoder._attention.name

    @property
    def shape(self) -> KVShape:
        return self.decoder._attention.shape

    def compute(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> Told:
        """One packed step. `chunks`: (row, tokens computed before, new tokens), single tokens first.

        The token chosen after each.
        """
        ids: list[int] = []
        positions: list[int] = []
        segments, last = [], []
        for row, before, tokens in chunks:
            segments.append(Segment(len(ids), len(tokens), before + len(tokens), self._blocks[row]))
            ids += tokens
            positions += range(before, before + len(tokens))
            last.append(len(ids) - 1)
        self.decoder.launch(ids, positions, segments, last, [KNOWN] * len(ids))
        return self.decoder.choose([self._choosing(row, before + len(new)) for row, before, new in chunks])

    def start_decoding(self, computed: int, ids: Sequence[int]) -> None:
        """Every row has `computed` tokens in the cache and goes on with its token of `ids`."""
        self._computed, self._ids = computed, list(ids)

    def decode(self) -> Told:
        """One step of every row, from the tokens that the one before chooses."""
        at = self._computed
        segments = [Segment(row, 1, at + 1, blocks) for row, blocks in enumerate(self._blocks)]
        rows = range(self.rows)
        ids, sources = (self._ids, [KNOWN] * self.rows) if self._ids else ([0] * self.rows, list(rows))
        self.decoder.launch(ids, [at] * self.rows, segments, rows, sources)
        self._computed, self._ids = at + 1, None
        return self.decoder.choose([self._choosing(row, at + 1) for row in rows])

    def _choosing(self, row: int, length: int) -> Choosing:
        blocks = self._blocks[row][: -(-length // self._block_size)]
        return Choosing(self._sampling, 1, length, blocks)
