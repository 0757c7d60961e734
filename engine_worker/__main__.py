"""`python -m engine_worker --model NAME=DIR`: one engine, one model, one place in the fleet."""

from __future__ import annotations

import os
import sys

from engine_worker.arguments import parse
from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.build import follow
from engine_worker.engine.embedding_engine import EmbeddingEngine
from engine_worker.engine.types import UnsupportedModel
from engine_worker.model_card import ModelCardError, read_model_card
from engine_worker.model_store import ModelStoreError, ensure_model
from engine_worker.process import configure_logging, run_worker
from engine_worker.runner import group
from engine_worker.runner.encoder import is_encoder
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
        if is_encoder(directory):
            embedder = EmbeddingEngine(config)
            return run_worker(
                embedder,
                lambda: read_model_card(
                    arguments.worker.model,
                    directory,
                    context_length=embedder.encoder.max_tokens,
                    dtype="fp32",
                    dimensions=embedder.encoder.dimensions,
                ),
                arguments.worker,
            )
        engine = VLLMEngine(config) if config.backend == "vllm" else AsyncEngine(config)
        return run_worker(
            engine,
            lambda: read_model_card(
                arguments.worker.model,
                directory,
                context_length=engine.limits.max_model_len,
                dtype=config.precision,
                adapters=config.adapter_tenants(),
            ),
            arguments.worker,
        )
    except (ModelStoreError, ModelCardError, UnsupportedModel, TracingUnavailable, ValueError) as error:
        # Nothing that a restart would mend: one clear line instead of a traceback.
        print(f"engine_worker: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
