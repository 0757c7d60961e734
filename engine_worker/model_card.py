"""What a model directory says of itself to gateways: tokenizer, template, limits. Reads no weights, needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from engine_worker.model_files import ModelFileError, read_json, token_text
from engine_worker.protocol import ModelCard, SamplingDefaults

log = structlog.get_logger(__name__)


def read_model_card(
    name: str,
    directory: Path,
    *,
    context_length: int,
    dtype: str,
    adapters: Mapping[str, str] | None = None,
    dimensions: int = 0,
    has_sampling: bool = True,
) -> tuple[ModelCard, bytes]:
    """The card, and the bytes of the `tokenizer.json` that it names.

    `context_length` is what the engine accepts, which may be less than what the model was trained for.
    `dimensions` makes it an embedding model's. `has_sampling`: whether generation_config.json has a say in how it is
    sampled.
    """
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json", optional=True)
    tokenizer_config = read_json(directory / "tokenizer_config.json", optional=True)
    try:
        tokenizer = (directory / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ModelFileError(f"{directory} has no readable tokenizer.json: {error.strerror}") from error
    text_config = config.get("text_config", config)
    eos = generation.get("eos_token_id", text_config.get("eos_token_id"))
    card = ModelCard(
        model=name,
        revision=_fingerprint(directory),
        architecture=(config.get("architectures") or ["unknown"])[0],
        context_length=context_length,
        vocab_size=int(text_config["vocab_size"]),
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        bos_token=token_text(tokenizer_config.get("bos_token")),
        eos_token=token_text(tokenizer_config.get("eos_token")),
        chat_template=_chat_template(directory, tokenizer_config),
        sampling=_sampling(generation if has_sampling else {}, directory),
        dtype=dtype,
        kind="embedding" if dimensions else "generate",
        dimensions=dimensions,
        adapters=dict(adapters or {}),
    )
    return card, tokenizer


def _sampling(generation: Mapping[str, Any], directory: Path) -> SamplingDefaults:
    """What is out of range is left out: it is advice."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingDefaults):
        value = generation.get(field.name)
        try:
            found[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            file = directory / "generation_config.json"
            log.warning("generation_config_ignored", file=str(file), field=field.name, error=str(error))
    return SamplingDefaults(**found)


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # named templates; the one called default is the chat's
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _fingerprint(directory: Path) -> str:
    """Names the weights: config, and of each weight file its name, size, header and samples of its content.

    A full hash would read tens of gigabytes at each start; two models with equal headers and samples
    at seventeen places are the same one.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    weights = sorted(path for path in directory.iterdir() if path.suffix in {".safetensors", ".gguf", ".bin"})
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sixteenth in range(17):
                file.seek(max(0, size - 65536) * sixteenth // 16)
                digest.update(file.read(65536))
    return digest.hexdigest()
