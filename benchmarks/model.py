"""The model that benchmarks run, made ready."""

from __future__ import annotations

import sys
from pathlib import Path

from engine_worker.model_store import DEFAULT_MODEL, ModelStoreError, ensure_model

_MODELS = Path(__file__).parents[1] / "var" / "models"


def prepared(name: str = DEFAULT_MODEL) -> Path:
    """Its directory. Ends the program with the reason where there is no such model."""
    try:
        return ensure_model(name, _MODELS)
    except ModelStoreError as error:
        sys.exit(str(error))
