"""A Hugging Face directory to a model that runs in the engine, or a clear refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from engine_worker.attention import interface
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.model_files import read_json, token_text
from engine_worker.runner import group
from engine_worker.runner.families import context_length, refuse_family, refuse_unsupported

GPU_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.bfloat16}
"""By precision: on a GPU the weights' 16 bits are bfloat16's, whose range every family was trained in."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    """Ids that the tokenizer knows; an lm_head may be wider, for alignment."""
    special_token_ids: frozenset[int]
    """Ids without text."""
    context_length: int
    num_layers: int
    num_kv_heads: int
    """Of this process, where several share the model."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    size: int
    """Ids that the tokenizer knows; an lm_head may be wider, for alignment."""
    special_token_ids: frozenset[int]
    """Ids without text."""


def read_vocabulary(model_dir: Path, config: PretrainedConfig) -> Vocabulary:
    """What a model directory says of tokens; reads no weights. Raises UnsupportedModel."""
    if not (model_dir / "tokenizer.json").is_file():
        raise UnsupportedModel(f"{model_dir} has no tokenizer.json: only fast tokenizers are served")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return Vocabulary(
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model_dir, config, tokenizer),
        size=min(config.vocab_size, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1),
        special_token_ids=frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        ),
    )


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Raises UnsupportedModel, naming what is not served or missing."""
    if not (model_dir / "config.json").is_file():
        raise UnsupportedModel(f"{model_dir} is not a model directory: it has no config.json")
    # Before AutoConfig, which knows more families than are served and asks to run code for the others.
    refuse_family(json.loads((model_dir / "config.json").read_text()).get("model_type"))
    config = AutoConfig.from_pretrained(model_dir)
    refuse_unsupported(config)
    vocabulary = read_vocabulary(model_dir, config)
    _refuse_weights(model_dir)
    interface.register()
    transformers_logging.disable_progress_bar()  # a worker's log is lines, not bars
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation=interface.IMPLEMENTATION,
        use_safetensors=True,
        distributed_config=_shared(),
    ).eval()
    return LoadedModel(
        model=model,
        tokenizer=vocabulary.tokenizer,
        eos_token_ids=vocabulary.eos_token_ids,
        vocab_size=vocabulary.size,
        special_token_ids=vocabulary.special_token_ids,
        context_length=context_length(config),
        num_layers=config.num_hidden_layers,
        num_kv_heads=group.share_heads(config, config.num_key_value_heads, "KV heads"),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


def _shared() -> DistributedConfig | None:
    """How the processes of a group share the model; None: this one has all of it."""
    return DistributedConfig(tp_plan="auto", tp_size=group.size()) if group.size() > 1 else None


def _refuse_weights(model_dir: Path) -> None:
    """Raises UnsupportedModel for weights in another format than safetensors, or with a part missing."""
    index = model_dir / "model.safetensors.index.json"
    parts = ["model.safetensors"]
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [part for part in parts if not (model_dir / part).is_file()]
    if not missing:
        return
    pickles = sorted(path.name for path in model_dir.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles and not index.is_file():
        raise UnsupportedModel(
            f"{pickles[0]} is a pickle, which can run any code when it is read: only safetensors are served"
        )
    raise UnsupportedModel(f"{model_dir} lacks weights: {missing[0]} is missing")


def _eos_token_ids(model_dir: Path, config: PretrainedConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """All of them: instruct models often name a second one only in generation_config.json, and fine-tuned ones the end
    of their turns only as their tokenizer's."""
    tokenizers_own = token_text(
        read_json(model_dir / "tokenizer_config.json", optional=True).get("eos_token")
    )
    named = (
        config.eos_token_id,
        read_json(model_dir / "generation_config.json", optional=True).get("eos_token_id"),
        None if tokenizers_own is None else tokenizer.token_to_id(tokenizers_own),
    )
    ids: set[int] = set()
    for value in named:
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)
