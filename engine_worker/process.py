"""One worker as an operating-system process: logging, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

import structlog
import uvloop

from engine_worker import metrics
from engine_worker.broker import WorkerBroker
from engine_worker.engine.types import Engine
from engine_worker.protocol import ModelCard
from engine_worker.served_models import Make, ServedModels
from engine_worker.starting import announced
from engine_worker.tracing import set_up
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig

_log = structlog.get_logger("engine_worker.process")

_ENGINE_STOP_S: Final = 10.0
_SAME_STOP_S: Final = 2.0
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def configure_logging() -> None:
    """One line per event on standard error: `key=value`, or JSON with WEIR_LOG_FORMAT=json."""
    as_json = os.environ.get("WEIR_LOG_FORMAT") == "json"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer()
            if as_json
            else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def run_worker(engine: Engine, describe: Callable[[], tuple[ModelCard, bytes]], config: WorkerConfig) -> int:
    """Starts the engine, serves until it is told to stop (see _Stop), stops it; the process's exit code.

    `describe` is called once the engine has started, and tells what gateways must know. Raises TracingUnavailable.
    """
    if config.tracing:
        set_up("weir-engine-worker")
    return uvloop.run(_run(engine, describe, config))


def run_models(make: Make, source: str, config: WorkerConfig) -> int:
    """The same for several models, of which the first is `config.model`. Raises Refused when it can't be loaded."""
    if config.tracing:
        set_up("weir-engine-worker")

    async def run() -> int:
        served = ServedModels(make, config, most=config.max_models)
        if config.metrics_port:
            metrics.serve(served.engines, host=config.metrics_host, port=config.metrics_port)

        stop = _Stop(served)

        def stop_or_end(number: int) -> None:
            if not served.names:
                os._exit(0)  # as in _end_at_once_on_signals
            stop(number)

        _on_signals(stop_or_end)
        await served.load(config.model, source)
        _on_signals(stop)
        return await served.run()

    return uvloop.run(run())


class _Stop:
    """What signals mean. The first: finish what runs, and go; SIGINT, which a person gives who ended this worker
    and nothing else, also that nobody starts it again. One that comes a while later: hand back what runs.

    Several at once are one: a supervisor tells its child, and so does the terminal or the end of that supervisor.
    """

    def __init__(self, served: Worker | ServedModels) -> None:
        self._served = served
        self._stopped_at = float("inf")

    def __call__(self, number: int) -> None:
        now = time.monotonic()
        if now - self._stopped_at > _SAME_STOP_S:
            self._served.hand_back()
        self._stopped_at = min(self._stopped_at, now)
        self._served.stop(for_good=number == signal.SIGINT)


def _on_signals(heard: Callable[[int], None]) -> None:
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, heard, number)


def _end_at_once_on_signals() -> None:
    """While a model is loaded and kernels are compiled: that can't be interrupted, and nothing depends on its end.

    By the kernel, which needs no turn of an interpreter that is busy. Process 1, a container's, it does not end so.
    """
    if os.getpid() == 1:
        _on_signals(lambda _: os._exit(0))
        return
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


async def _run(engine: Engine, describe: Callable[[], tuple[ModelCard, bytes]], config: WorkerConfig) -> int:
    _end_at_once_on_signals()
    broker = WorkerBroker(
        config.redis_url,
        model=config.model,
        worker_id=config.worker_id,
        lease_ms=config.lease_ms,
        timeout_s=config.broker_timeout_s,
    )
    try:
        async with announced(broker, every_s=config.heartbeat_s):
            await engine.start()
        if config.metrics_port:
            metrics.serve(lambda: {config.model: engine}, host=config.metrics_host, port=config.metrics_port)
        worker = Worker(engine, broker, *describe(), config)
        _on_signals(_Stop(worker))
        code = await worker.run()
    finally:
        await broker.aclose()
    try:
        async with asyncio.timeout(_ENGINE_STOP_S):
            await engine.stop()
    except TimeoutError:
        # A step that hangs (a dead device) can't be interrupted; all requests are handed back by now.
        _log.error("engine_stop_timed_out", after_s=_ENGINE_STOP_S)
        sys.stderr.flush()
        os._exit(code or 1)
    return code
