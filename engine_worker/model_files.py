"""The JSON files of a model directory. Imports the standard library alone: the GPU's benchmarks have nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ModelFileError(Exception):
    """The directory lacks something that serving needs; the message names the file."""


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ModelFileError(
            f"{path} is missing: {path.parent} is not a Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    return value


def token_text(value: Any) -> str | None:
    """Either a string or an AddedToken written out."""
    content = value.get("content") if isinstance(value, dict) else value
    return None if content is None else str(content)
