"""The model's forward pass over one packed step, by torch's kernels or by ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.interface import PLAN, AttentionPlan, KVShape, Segment
from engine_worker.config import EngineConfig
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.runner import group
from engine_worker.runner.adapters import Adapters, adapted_layers, load_adapters
from engine_worker.runner.lean_model import LeanModel
from engine_worker.runner.model_loader import LoadedModel

log = structlog.get_logger(__name__)


class Decoder(Protocol):
    """Holds the weights and the KV cache. Belongs to one thread."""

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """Each [layers, blocks, ...]: what blocks hold after all that was launched, in a layout of its own."""

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
    ) -> Tensor:
        """Computes a packed row of tokens; segments of one token come first.

        Returns logits, float32[len(sampled), vocabulary], of the rows `sampled`; valid until the next call.
        """

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks that may hold NaN, which a mask of -inf does not stop."""


class TorchDecoder:
    """On torch's kernels."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, shape: KVShape) -> None:
        self._adapters = Adapters(loaded.model, load_adapters(loaded.model, config.adapter_dirs()))
        self._logits: _Logits
        if group.size() == 1:
            self._logits = LeanModel(loaded.model, config.precision)
        else:
            self._logits = _SharedModel(loaded.model)
        self._attention = CpuAttention(shape)
        self.keys, self.values = self.caches = self._attention.keys, self._attention.values

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
    ) -> Tensor:
        self._adapters.select(segments)
        # `sampled` may be empty, which says nothing of its type.
        return self._logits(
            torch.tensor(token_ids),
            torch.tensor(positions),
            self._attention.plan(segments),
            torch.tensor(sampled, dtype=torch.int64),
        )

    def scrub(self, blocks: Sequence[int]) -> None:
        self._attention.scrub(blocks)


_Logits = Callable[[Tensor, Tensor, AttentionPlan, Tensor], Tensor]
"""Of token ids, positions, the step's plan and the sampled rows: see LeanModel."""


class _SharedModel:
    """`transformers`' modules unmodified: in a group they know that each process holds a part."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, sampled: Tensor) -> Tensor:
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sampled,
            **{PLAN: plan},
        )
        logits: Tensor = output.logits[0]
        return logits


def make_decoder(config: EngineConfig, loaded: LoadedModel, shape: KVShape) -> Decoder:
    """By `config.kernels`: ours where they can run this model. Raises UnsupportedModel if they must and can't."""
    if group.size() == 1:
        return _make_decoder(config, loaded, shape)
    if config.device == "cpu" and (config.kernels == "compiled" or config.precision != "fp32"):
        raise UnsupportedModel(
            "several processes for one model take kernels torch and precision fp32 on the CPU"
        )
    if config.adapters:
        raise UnsupportedModel("several processes for one model take no adapters")
    decoder = _make_decoder(replace(config, kernels="torch"), loaded, shape)
    return group.Leader(decoder) if group.is_leader() else decoder


def _make_decoder(config: EngineConfig, loaded: LoadedModel, shape: KVShape) -> Decoder:
    if config.device != "cpu":
        # Here and not above: Triton exists for Linux only.
        from engine_worker.runner.gpu_decoder import GpuDecoder

        gpu_decoder = GpuDecoder(config, loaded, shape)
        gpu_decoder.warm()
        return gpu_decoder
    reason = _not_compiled(config, loaded)
    if reason is None:
        # It compiles when it is imported, which only a machine that can run it survives.
        from engine_worker.compiled.once import compiling

        with compiling():
            from engine_worker.compiled.decoder import CompiledDecoder

        adapters = load_adapters(loaded.model, config.adapter_dirs())
        return CompiledDecoder(loaded, shape, config.precision, config.thread_count(), adapters)
    if config.kernels == "compiled":
        raise UnsupportedModel(f"the compiled kernels can't run this: {reason}")
    log.info("decoder.torch_kernels", reason=reason)
    return TorchDecoder(config, loaded, shape)


def cache_dtype(config: EngineConfig, loaded: LoadedModel) -> torch.dtype:
    """What the decoder for this model keeps keys and values in."""
    if config.precision == "fp32" or _not_compiled(config, loaded) is not None:
        return torch.float32
    return torch.int8 if config.precision == "int8" else torch.float16


def _not_compiled(config: EngineConfig, loaded: LoadedModel) -> str | None:
    """Why torch's kernels run this model; None if ours do."""
    if config.kernels == "torch":
        return "they were asked for"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    # Here and not above: numba is optional.
    from engine_worker.compiled.support import unsupported

    adapted = set[str]().union(*map(adapted_layers, config.adapter_dirs().values()))
    return unsupported(loaded, adapted)
