"""Writes GGUF files as llama.cpp's converter does, from tiny Hugging Face models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter
from safetensors.torch import load_file

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""What GGUF calls a family, where it has another name."""


def write_gguf(model_dir: Path, path: Path, **extra: Any) -> Path:
    """The float32 weights of `model_dir`, and of its settings what llama.cpp writes.

    `extra`: more settings of the architecture, `.` written as `__`.
    """
    config = json.loads((model_dir / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(config["head_dim"])
    if config.get("sliding_window") and "qwen" not in architecture:
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for name, value in extra.items():
        _add(writer, f"{architecture}.{name.replace('__', '.')}", value)
    _tokenizer(writer, model_dir, config["eos_token_id"])
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        weight = tensor.numpy()
        if architecture == "llama" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            # llama.cpp rotates neighbours, transformers halves.
            halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
        if "gemma" in architecture and name.endswith("norm.weight"):
            weight = weight + 1
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config["head_dim"], rope))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
    add(key, value)


def _tokenizer(writer: GGUFWriter, model_dir: Path, end_token_id: int) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted({**ids, **special}, key={**ids, **special}.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = tokenizer["model"].get("merges", [])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(end_token_id)


def _llama3_factors(head_dim: int, rope: dict[str, Any]) -> np.ndarray:
    """Of convert_hf_to_gguf.py (LlamaModel.generate_extra_tensors), frequency by frequency."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
