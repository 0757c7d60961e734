"""A real worker process without a model: `python -m tests.engine_worker.scripted_worker NAME [DIR]`.

Takes its speed from SCRIPTED_STEP_S, SCRIPTED_TOKENS_PER_STEP and SCRIPTED_MAX_NUM_SEQS, where an answer ends by
itself from SCRIPTED_STOP_AFTER, Redis from REDIS_URL. With SCRIPTED_BUSY it never starts. With DIR, the card and
tokenizer are that model directory's.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from pathlib import Path

from engine_worker.model_card import read_model_card
from engine_worker.process import configure_logging, run_worker
from engine_worker.protocol import ModelCard
from engine_worker.worker_config import WorkerConfig
from tests.engine_worker.scripted_engine import ScriptedEngine


class BusyEngine(ScriptedEngine):
    """Never starts, and lets no other thread of this process run, as a compiler can."""

    async def start(self) -> None:
        def hold_the_interpreter() -> None:
            print("event=starting", file=sys.stderr, flush=True)
            ctypes.PyDLL(None).sleep(60)

        threading.Thread(target=hold_the_interpreter, daemon=True).start()
        await asyncio.Event().wait()


def main() -> int:
    configure_logging()
    name = sys.argv[1]
    context_length = 8192

    def describe() -> tuple[ModelCard, bytes]:
        if len(sys.argv) > 2:
            return read_model_card(name, Path(sys.argv[2]), context_length=context_length, dtype="float32")
        card = ModelCard(
            model=name,
            revision="scripted",
            architecture="Scripted",
            context_length=context_length,
            vocab_size=256,
            eos_token_ids=[0],
            tokenizer_sha256="scripted",
        )
        return card, b"{}"

    engine = (BusyEngine if "SCRIPTED_BUSY" in os.environ else ScriptedEngine)(
        step_s=float(os.environ.get("SCRIPTED_STEP_S", "0.01")),
        tokens_per_step=int(os.environ.get("SCRIPTED_TOKENS_PER_STEP", "1")),
        max_num_seqs=int(os.environ.get("SCRIPTED_MAX_NUM_SEQS", "64")),
        stop_after=int(os.environ.get("SCRIPTED_STOP_AFTER", "0")) or None,
        context_length=context_length,
    )
    lease_ms = int(os.environ.get("SCRIPTED_LEASE_MS", "10000"))
    config = WorkerConfig(
        model=name,
        redis_url=os.environ["REDIS_URL"],
        lease_ms=lease_ms,
        tracing=os.environ.get("WEIR_TRACING") == "true",
    )
    return run_worker(engine, describe, config)


if __name__ == "__main__":
    sys.exit(main())
