"""`python -m engine_worker --model NAME=DIR`: one process, one model (or some), one place in the fleet."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from engine_worker.arguments import Arguments, parse
from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.build import follow
from engine_worker.engine.embedding_engine import EmbeddingEngine
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.engine.types import Engine
from engine_worker.host_memory import refuse_what_does_not_fit
from engine_worker.model_card import read_model_card
from engine_worker.model_files import ModelFileError
from engine_worker.model_store import ModelStoreError, ensure_model
from engine_worker.process import configure_logging, run_models, run_worker
from engine_worker.runner import group
from engine_worker.runner.encoder import is_encoder
from engine_worker.served_models import Describe
from engine_worker.tracing import TracingUnavailable
from engine_worker.vllm_engine import VLLMEngine


def main() -> int:
    arguments = parse(sys.argv[1:], os.environ)
    configure_logging()
    try:
        directory = ensure_model(arguments.model_spec, arguments.var_dir / "models")
        config = EngineConfig(model_dir=directory, **arguments.engine)
        if group.join(os.environ, device=config.device) and not group.is_leader():
            follow(config)
            return 0
        if arguments.worker.max_models > 1:
            return run_models(
                lambda name, source: _one_of_several(name, source, arguments),
                arguments.model_spec,
                arguments.worker,
            )
        return run_worker(*_engine(arguments.worker.model, directory, arguments), arguments.worker)
    except (ModelStoreError, ModelFileError, UnsupportedModel, TracingUnavailable, ValueError) as error:
        # Nothing that a restart would mend: one clear line instead of a traceback.
        print(f"engine_worker: {error}", file=sys.stderr)
        return 2


def _one_of_several(name: str, source: str, arguments: Arguments) -> tuple[Engine, Describe]:
    """Raises NotEnoughMemory, ModelStoreError."""
    directory = ensure_model(source, arguments.var_dir / "models")
    refuse_what_does_not_fit(_config(directory, arguments))
    return _engine(name, directory, arguments)


def _config(directory: Path, arguments: Arguments) -> EngineConfig:
    """With each model's part of the memory."""
    config = EngineConfig(model_dir=directory, **arguments.engine)
    most = arguments.worker.max_models
    return replace(
        config,
        kv_cache_memory=config.kv_cache_memory // most,
        swap_memory=config.swap_memory // most,
        gpu_memory_utilization=config.gpu_memory_utilization / most,
    )


def _engine(name: str, directory: Path, arguments: Arguments) -> tuple[Engine, Describe]:
    """For a prepared model; not started."""
    config = _config(directory, arguments)
    if is_encoder(directory):
        embedder = EmbeddingEngine(config)
        return embedder, lambda: read_model_card(
            name,
            directory,
            context_length=embedder.encoder.max_tokens,
            dtype="fp32",
            dimensions=embedder.encoder.dimensions,
        )
    engine = VLLMEngine(config) if config.backend == "vllm" else AsyncEngine(config)
    return engine, lambda: read_model_card(
        name,
        directory,
        context_length=engine.limits.max_model_len,
        dtype=config.precision,
        has_sampling=arguments.worker.model_sampling,
        adapters=config.adapter_tenants(),
    )


if __name__ == "__main__":
    sys.exit(main())
