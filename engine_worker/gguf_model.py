"""A GGUF file dequantised to a Hugging Face directory, for the families that the engine serves.

Names of weights, layouts and most settings are those that `transformers` knows of GGUF. What it leaves
out is read here (windows, softcaps, scaled rotary embeddings), and what is still not understood is
refused: a setting that is ignored gives fluent text and wrong tokens.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from engine_worker.engine.errors import UnsupportedModel
from engine_worker.runner.families import refuse_unsupported

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types (llama.cpp, llama.h: llama_token_attr)
_DEFAULT_THETA: Final = 10000.0
"""Of llama.cpp, where a file names no rope.freq_base."""
_ROPE_FACTORS: Final = "rope_freqs.weight"
"""What each rotary frequency is divided by: how llama.cpp writes the scaling of Llama 3.1 and later."""
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries alone are scaled by hidden size over heads (llama.cpp does the same)."""


class GGUFError(Exception):
    """The file is broken, or holds something that would give wrong tokens; the message names it."""


def convert(gguf: Path, directory: Path, *, progress: bool) -> None:
    """Writes config, generation config, tokenizer, chat template and fp32 weights of `gguf`.

    Raises GGUFError, and OSError when the disk is full.
    """
    try:
        parsed: dict[str, Any] = load_gguf_checkpoint(str(gguf), return_tensors=False)
        reader: Any = GGUFReader(gguf)
    except (ValueError, KeyError, IndexError) as error:
        raise GGUFError(f"not a GGUF file that can be converted: {error}") from error
    config = _config(reader, parsed["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    _write_tokenizer(gguf, parsed, directory)
    _save(_weights(reader, config, model, gguf.stem, progress=progress), directory)


def _config(reader: Any, parsed: dict[str, Any]) -> PretrainedConfig:
    architecture: str = reader.fields["general.architecture"].contents()
    values = {key: _shortest_float(value) for key, value in parsed.items() if not key.startswith("_")}
    # Mistral's files say llama, and a window makes the difference.
    window = _setting(reader, "attention.sliding_window")
    if architecture == "llama" and window:
        values["model_type"] = "mistral"
    if window is not None:
        values["sliding_window"] = window or None
    if architecture != "phi3" and (head_dim := _setting(reader, "attention.key_length")):
        values["head_dim"] = head_dim
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (softcap := _setting(reader, name)) is not None:
            values[name] = softcap
    if architecture in _LARGEST_GEMMA:
        largest = values["num_hidden_layers"] == _LARGEST_GEMMA[architecture]
        per_head = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = per_head if largest else values["head_dim"]
    values.pop("rope_theta", None)
    values["rope_parameters"] = _rope(reader, architecture, values)
    if _setting(reader, "split.count", 1, prefix="") > 1:
        raise GGUFError("it is one of several parts: join them first (llama-gguf-split --merge)")
    # A family's own ids would be those of another tokenizer.
    special = {f"{name}_token_id": values.pop(f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    try:
        config: PretrainedConfig = AutoConfig.for_model(**values, **special)
        refuse_unsupported(config)
    except (UnsupportedModel, ValueError) as error:
        raise GGUFError(str(error)) from error
    return config


def _setting(reader: Any, name: str, default: Any = None, *, prefix: str | None = None) -> Any:
    """What the file says under `name`, of its architecture unless `prefix` says otherwise."""
    if prefix is None:
        prefix = reader.fields["general.architecture"].contents() + "."
    field = reader.fields.get(prefix + name)
    return default if field is None else _shortest_float(field.contents())


def _rope(reader: Any, architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as transformers has them."""
    theta = _setting(reader, "rope.freq_base", _DEFAULT_THETA)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaling = _setting(reader, "rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": _setting(reader, "rope.scaling.factor")}
    elif scaling != "none":
        raise GGUFError(f"rotary embeddings scaled by {scaling!r} are not served from GGUF files")
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    if factors is not None:
        rope |= _llama3(np.asarray(factors, dtype=np.float64), theta)
    if architecture == "phi3":
        per_head = values["hidden_size"] // values["num_attention_heads"]
        rope["partial_rotary_factor"] = _setting(reader, "rope.dimension_count", per_head) / per_head
    if architecture == "gemma3":
        local = {
            "rope_type": "default",
            "rope_theta": _setting(reader, "rope.freq_base_swa", _DEFAULT_THETA),
        }
        return {"full_attention": rope, "sliding_attention": local}
    return rope


def _llama3(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling that lead to these factors; those of its releases are tried."""
    inverse = theta ** (-np.arange(len(factors)) / len(factors))
    for factor in (8.0, 32.0):
        low, high, original = 1.0, 4.0, 8192
        turns = original * inverse / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, wanted, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise GGUFError(f"{_ROPE_FACTORS} are not those of any Llama 3 that is known here")


def _shortest_float(value: Any) -> Any:
    """GGUF stores fp32: 1e-05 comes out as 9.999999747378752e-06, the model's authors wrote 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _weights(
    reader: Any, config: PretrainedConfig, model: torch.nn.Module, title: str, *, progress: bool
) -> dict[str, torch.Tensor]:
    # By the file's own architecture: Mistral's weights are laid out as Llama's.
    architecture = reader.fields["general.architecture"].contents()
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor: Any = kind(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor, model_type=architecture)
    wanted = {name for name, _ in model.named_parameters()}
    weights: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc=f"Preparing {title}", unit="tensor", disable=not progress):
        if tensor.name == _ROPE_FACTORS:
            continue  # read with the settings
        processed = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": weights},
        )
        if names.get(processed.name) not in wanted:
            raise GGUFError(f"it has weights that are not understood: {tensor.name}")
        weights[names[processed.name]] = torch.from_numpy(processed.weights.astype(np.float32)).contiguous()
    if missing := wanted - weights.keys():
        raise GGUFError(f"it lacks weights: {', '.join(sorted(missing)[:3])} ...")
    return {name: weights[name] for name in sorted(wanted)}


def _save(weights: dict[str, torch.Tensor], directory: Path) -> None:
    size = sum(weight.nbytes for weight in weights.values())
    if shutil.disk_usage(directory).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file = directory / "model.safetensors"
    try:
        # "pt" is what transformers checks for before it loads a file.
        save_file(weights, file, {"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
    file.chmod(0o644)


def _write_tokenizer(gguf: Path, parsed: dict[str, Any], directory: Path) -> None:
    chat_template = parsed["tokenizer_config"].get("chat_template")
    if chat_template:
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    if parsed["tokenizer"].get("pre_tokenizer_type") != "smollm":
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(directory)
        return
    # transformers' own conversion takes most of half a minute and drops the digit splitter that the
    # file names ("smollm": single digits, then GPT-2's byte-level BPE).
    fields = parsed["tokenizer"]
    tokens: list[str] = fields["tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields.get("merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["token_type"], strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {
        key: tokens[fields[f"{key}_id"]]
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if fields.get(f"{key}_id") is not None
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": parsed["config"]["max_position_embeddings"],
        **special,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8"
    )
