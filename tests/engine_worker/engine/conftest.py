from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_worker.config import EngineConfig
from engine_worker.engine.build import Built, build
from tests.engine_worker.models import make_tiny_model, reference


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_dir: Path) -> Any:
    return reference(tiny_dir)


@pytest.fixture(scope="session")
def tiny_config(tiny_dir: Path) -> EngineConfig:
    return EngineConfig(
        model_dir=tiny_dir,
        block_size=4,
        num_kv_blocks=257,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        threads=1,
        precision="fp32",
    )


@pytest.fixture
def build_tiny(tiny_config: EngineConfig) -> Callable[..., Built]:
    """A core for the tiny model, with changes to its configuration."""
    return lambda **changes: build(replace(tiny_config, **changes))
