"""Texts to vectors with a BERT encoder, as sentence-transformers computes them (Reimers and Gurevych, 2019)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine_worker.engine.errors import UnsupportedModel

ENCODERS: Final = ("bert",)


def is_encoder(model_dir: Path) -> bool:
    """Whether the directory holds an embedding model, and not one that generates."""
    return _json(model_dir / "config.json").get("model_type") in ENCODERS


class Encoder:
    """Mean or first-token pooling, normalised where the model says so. Belongs to one thread."""

    def __init__(self, model: PreTrainedModel, *, pooling: str, normalise: bool, max_tokens: int) -> None:
        self._model = model
        self._pooling = pooling
        self._normalise = normalise
        self.max_tokens = max_tokens
        self.vocab_size = int(model.config.vocab_size)
        self.dimensions = int(model.config.hidden_size)

    @classmethod
    def load(cls, model_dir: Path) -> Encoder:
        """In float32. Raises UnsupportedModel, naming what is missing or not served."""
        family = _json(model_dir / "config.json").get("model_type")
        if family not in ENCODERS:
            raise UnsupportedModel(f"encoder {family!r} is not served; served are: {', '.join(ENCODERS)}")
        if not (model_dir / "model.safetensors").is_file():
            raise UnsupportedModel(f"{model_dir} has no model.safetensors; pickles are not read")
        modes = [
            name.removeprefix("pooling_mode_")
            for name, on in _json(model_dir / "1_Pooling" / "config.json").items()
            if name.startswith("pooling_mode_") and on is True
        ]
        pooling = modes[0] if modes else "mean_tokens"
        if modes[1:] or pooling not in ("mean_tokens", "cls_token"):
            raise UnsupportedModel(f"pooling {', '.join(modes)} is not served; mean_tokens and cls_token are")
        modules: Any = _json(model_dir / "modules.json") or []
        transformers_logging.disable_progress_bar()
        model = AutoModel.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
        ).eval()
        own = _json(model_dir / "sentence_bert_config.json").get("max_seq_length")
        longest = model.config.max_position_embeddings
        return cls(
            model,
            pooling=pooling,
            normalise=any(str(module.get("type", "")).endswith("Normalize") for module in modules),
            max_tokens=min(longest, own or longest),
        )

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """float32[texts, dimensions] of token ids, special tokens included. Padded to the longest."""
        width = max(map(len, texts))
        ids = torch.zeros(len(texts), width, dtype=torch.int64)
        mask = torch.zeros(len(texts), width, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        hidden: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        if self._pooling == "cls_token":
            pooled = hidden[:, 0]
        else:
            weights = mask[..., None].to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1) if self._normalise else pooled


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
