"""What a worker says of itself with each heartbeat."""

from __future__ import annotations

import os
import socket
import time

from engine_worker.engine.measurements import Distribution
from engine_worker.engine.types import Engine
from engine_worker.metrics import peak_memory_bytes
from engine_worker.protocol import WorkerStatus
from engine_worker.worker_config import WorkerConfig


def status_of(
    engine: Engine,
    config: WorkerConfig,
    model: str,
    *,
    started_at_ms: int,
    draining: bool,
    goes_for_good: bool = False,
) -> WorkerStatus:
    stats, meter = engine.stats(), engine.meter
    return WorkerStatus(
        worker_id=config.worker_id,
        model=model,
        device=config.device,
        started_at_ms=started_at_ms,
        updated_at_ms=now_ms(),
        steps=stats.steps,
        running=stats.running,
        waiting=stats.waiting,
        max_num_seqs=stats.running + stats.waiting + engine.room(),
        kv_blocks_total=stats.kv_blocks_total,
        kv_blocks_used=stats.kv_blocks_used,
        step_ms=stats.step_s * 1000,
        draining=draining,
        goes_for_good=goes_for_good,
        rung=stats.rung,
        kv_blocks_cached=stats.kv_blocks_cached,
        prompt_tokens=stats.prompt_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        output_tokens=meter.output_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        preemptions=stats.preemptions,
        peak_memory_bytes=peak_memory_bytes(),
        ttft_ms=_quantiles_ms(meter.time_to_first_token),
        itl_ms=_quantiles_ms(meter.inter_token),
        queue_ms=_quantiles_ms(meter.queue),
        prefill_ms=_quantiles_ms(meter.prefill),
        decode_ms=_quantiles_ms(meter.decode),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _quantiles_ms(distribution: Distribution) -> tuple[float, float, float] | None:
    if not any(distribution.counts):
        return None
    p50, p90, p99 = distribution.recent(0.5, 0.9, 0.99)
    return p50 * 1000, p90 * 1000, p99 * 1000


def now_ms() -> int:
    return int(time.time() * 1000)
