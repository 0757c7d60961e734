"""How one worker process behaves towards the broker. The engine has its own configuration."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field


def _worker_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: str
    """The name that clients use."""
    redis_url: str = field(repr=False)  # may hold a password
    worker_id: str = field(default_factory=_worker_id)
    """Name of this process among the workers; made up when absent."""
    device: str = "cpu"
    lease_ms: int = 10_000
    """Silent for so many milliseconds, the worker loses its requests to others."""
    broker_timeout_s: float = 2.0
    heartbeat_s: float = 1.0
    drain_grace_s: float = 30.0
    """After SIGTERM, so many seconds to finish what runs; the rest goes back to the queue."""
    redis_grace_s: float = 30.0
    """Without Redis, go on computing for so many seconds; then drop everything, to be resumed from the log."""
    canary_s: float = 30.0
    """An engine without work for so many seconds is asked for a token."""
    stall_s: float = 120.0
    """An engine that has work and makes no step for so many seconds counts as dead."""
    max_models: int = 1
    """Models that the process serves at once; above 1 an operator can load and unload them, and each engine gets an
    equal part of the memory for keys and values."""
    model_sampling: bool = True
    """Where neither request nor operator name temperature, top_k, top_p, min_p or repetition_penalty, take what the
    model's generation_config.json says. False: temperature 1 and nothing else, as OpenAI's API has it."""
    metrics_port: int = 0
    """Where Prometheus finds the engine's metrics; 0: nowhere."""
    metrics_host: str = "127.0.0.1"
    """The address of that port."""
    tracing: bool = False
    """Spans of each request's phases go by OTLP to where OTEL_EXPORTER_OTLP_ENDPOINT says."""
