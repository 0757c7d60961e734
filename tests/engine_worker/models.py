"""Models for the engine's tests: tiny random ones, and the real one where it has been prepared."""

from __future__ import annotations

import json
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BertConfig, BertModel, GenerationConfig

from engine_worker.model_store import DEFAULT_MODEL, ensure_model
from engine_worker.protocol import ModelCard

EOS, EOS_2 = 256, 257
VOCAB_SIZE = 258
"""Of the tiny models: one token per byte, then two end tokens."""


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, and byte b has id b, so any split of a character can be tested."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<eos2>", special=True)])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, in order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        # Large weights: with the usual 0.02 a random model's logits are near ties.
        "initializer_range": 0.3,
    }
    return AutoConfig.for_model(family, **{**settings, **changes})


def make_tiny_model(directory: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A random model of two layers, saved as a Hugging Face directory."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def weighted(model_dir: Path) -> Path:
    """Norms and biases, which a new model has at 1 and 0, become such that leaving one out would show."""
    model = reference(model_dir)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(model_dir)
    return model_dir


def reference(model_dir: Path) -> Any:
    """The same weights in `transformers`, as it runs them itself."""
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """What `transformers` generates for one prompt alone."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None if ignore_eos else model.generation_config.eos_token_id,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def greedy_given(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each token of `output` but its last.

    Equal to `output` exactly if greedy generation gives `output`: one forward instead of one per token.
    """
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return tokens


@torch.inference_mode()
def logprobs_given(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    """Log probability of each token of `output`, by the logits of one forward."""
    scores = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    chosen: list[float] = scores.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return chosen


@cache
def real_model_dir() -> Path:
    """The default model, converted at first use as `make run` does, into the same place."""
    return ensure_model(DEFAULT_MODEL, Path(__file__).parents[2] / "var" / "models", progress=False)


def workload(name: str = "w20") -> list[dict[str, Any]]:
    path = Path(__file__).parents[2] / "benchmarks" / "engine" / "workload.json"
    chats: list[dict[str, Any]] = json.loads(path.read_text())[name]
    return chats


def make_tiny_encoder(directory: Path) -> Path:
    """A random BERT whose tokens are bytes, with a tokenizer file that cuts and pads, as those of real ones do."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory)
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@torch.inference_mode()
def alone(model_dir: Path, text: list[int]) -> torch.Tensor:
    """Mean of the last layer, by an ordinary forward of one text."""
    model = AutoModel.from_pretrained(model_dir, attn_implementation="eager").eval()
    return model(torch.tensor([text])).last_hidden_state[0].mean(0)


def a_card() -> ModelCard:
    """Of a model of its own, with `byte_tokenizer`'s vocabulary."""
    return ModelCard(
        model=f"test-{uuid.uuid4().hex}",
        revision="r",
        architecture="Tiny",
        context_length=100,
        vocab_size=258,
        eos_token_ids=[256],
        tokenizer_sha256="x",
    )
