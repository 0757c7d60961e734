"""`python -m engine_worker --model-dir DIR --name NAME`: one engine worker, until SIGTERM.

REDIS_URL (or the file that REDIS_URL_FILE names) says where the queue is: a flag would show its
password to everybody on the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import get_args

from engine_worker.config import EngineConfig, Precision
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.types import UnsupportedModel
from engine_worker.model_card import ModelCardError, read_model_card
from engine_worker.process import configure_logging, run_worker
from engine_worker.protocol import ModelCard
from engine_worker.worker_config import WorkerConfig


def main() -> int:
    options = _parser().parse_args()
    configure_logging()
    try:
        engine_config = EngineConfig(
            model_dir=options.model_dir,
            precision=options.precision,
            device=options.device,
            threads=options.threads,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            kv_cache_memory=options.kv_cache_mib << 20,
        )
        worker_config = WorkerConfig(
            model=options.name or options.model_dir.name, redis_url=_redis_url(), device=options.device
        )
    except (ValueError, OSError) as error:
        sys.exit(f"engine_worker: {error}")
    engine = AsyncEngine(engine_config)

    def describe() -> tuple[ModelCard, bytes]:
        return read_model_card(
            worker_config.model,
            engine_config.model_dir,
            context_length=engine.limits.max_model_len,
            dtype=engine_config.precision,
        )

    try:
        return run_worker(engine, describe, worker_config)
    except (UnsupportedModel, ModelCardError) as error:
        sys.exit(f"engine_worker: {error}")


def _parser() -> argparse.ArgumentParser:
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    parser = argparse.ArgumentParser(prog="engine_worker", description="Serve one model on one device.")
    add = parser.add_argument
    add("--model-dir", type=Path, required=True, help="a Hugging Face model directory")
    add("--name", help="what clients call the model; default: the directory's name")
    add("--device", default=defaults["device"])
    add(
        "--precision",
        choices=get_args(Precision),
        default=defaults["precision"],
        help="of weights on the CPU",
    )
    add("--threads", type=int, help="inside an operation; default: one per physical core")
    add("--max-num-seqs", type=int, default=defaults["max_num_seqs"], help="sequences at once")
    add("--max-num-batched-tokens", type=int, default=defaults["max_num_batched_tokens"], help="per step")
    add("--max-model-len", type=int, help="prompt plus output; default: what the model was trained for")
    add("--kv-cache-mib", type=int, default=2048, help="memory for keys and values")
    return parser


def _redis_url() -> str:
    url, file = os.environ.get("REDIS_URL"), os.environ.get("REDIS_URL_FILE")
    if file and not url:
        url = Path(file).read_text(encoding="utf-8").strip()
    if not url:
        raise ValueError("REDIS_URL is not set: it names the Redis or Valkey that the gateways use")
    return url


if __name__ == "__main__":
    sys.exit(main())
