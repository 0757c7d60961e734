"""Celery's measurements for Prometheus: off unless WEIR_CELERY_METRICS_PORT is set.

Tasks run in several processes, so each writes to files in PROMETHEUS_MULTIPROC_DIR, prometheus_client's own
way, and the parent serves their sum. That variable must be in the environment before the process starts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from celery import signals
from django.conf import settings
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from weir.environment import BadEnvironment

_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"

if os.environ.get(_DIRECTORY):
    # Before the first metric: each opens its file there as soon as it is made.
    Path(os.environ[_DIRECTORY]).mkdir(parents=True, exist_ok=True)

TASKS = Counter("weir_celery_tasks", "Tasks that ended, by state.", ["task", "state"])
DURATION = Histogram("weir_celery_task_duration_seconds", "Of tasks.", ["task"])
LAST_SUCCESS = Gauge(
    "weir_celery_task_last_success_timestamp_seconds", "When a task last succeeded, Unix time.", ["task"],
    multiprocess_mode="max",
)  # fmt: skip
_started: dict[str, float] = {}


@signals.worker_init.connect
def _serve(**_: Any) -> None:
    if settings.CELERY_METRICS_PORT is None:
        return
    if not os.environ.get(_DIRECTORY):
        raise BadEnvironment(f"WEIR_CELERY_METRICS_PORT is set, but {_DIRECTORY} names no directory")
    directory = Path(os.environ[_DIRECTORY])
    for left in directory.glob("*.db"):  # of a worker that ran before
        if not left.stem.endswith(f"_{os.getpid()}"):
            left.unlink(missing_ok=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    start_http_server(settings.CELERY_METRICS_PORT, settings.CELERY_METRICS_HOST, registry)


@signals.task_prerun.connect
def _begin(task_id: str, **_: Any) -> None:
    _started[task_id] = time.perf_counter()


@signals.task_postrun.connect
def _end(task_id: str, task: Any, state: str | None = None, **_: Any) -> None:
    begun = _started.pop(task_id, None)
    TASKS.labels(task.name, (state or "unknown").lower()).inc()
    if begun is not None:
        DURATION.labels(task.name).observe(time.perf_counter() - begun)
    if state == "SUCCESS":
        LAST_SUCCESS.labels(task.name).set_to_current_time()


@signals.worker_process_shutdown.connect
def _gone(pid: int | None = None, **_: Any) -> None:
    if os.environ.get(_DIRECTORY):
        mark_process_dead(pid or os.getpid())  # type: ignore[no-untyped-call]
