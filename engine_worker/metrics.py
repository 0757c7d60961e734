"""The engine's measurements for Prometheus, on a port of the worker's own; off unless one is configured."""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine_worker.engine.measurements import Distribution
from engine_worker.engine.types import Engine

_PREFIX: Final = "weir_engine_"


def peak_memory_bytes() -> int:
    """The most that this process ever held in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(engines: Callable[[], Mapping[str, Engine]], *, host: str, port: int) -> WSGIServer:
    """Answers /metrics from a thread until it is shut down. Raises OSError when the port is taken.

    `engines`: those that run, by the name of their model.
    """
    registry = CollectorRegistry()
    registry.register(ProcessCollector(engines))
    server, _ = start_http_server(port, host, registry)
    return server


class ProcessCollector(Collector):
    """Reads at each scrape what each engine has counted anyway: of a name one family, with samples of every model."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, engine in self._engines().items():
            for family in _EngineFamilies(model).of(engine):
                if (first := families.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        return families.values()


class _EngineFamilies:
    """One label, `model`, and a few bounded ones."""

    def __init__(self, model: str) -> None:
        self._model = model

    def of(self, engine: Engine) -> Iterator[Metric]:
        stats, meter = engine.stats(), engine.meter
        padding = meter.padding_tokens
        launched, wasted = meter.scheduled_tokens + padding, meter.wasted_tokens + padding
        yield self._counter("requests", "Requests that ended, by reason.", "reason", meter.finished)
        yield self._counter("errors", "Requests that failed, by code.", "code", meter.errors)
        yield self._counter(
            "tokens",
            "Prompt tokens of started requests, those of them from the prefix cache, output tokens.",
            "kind",
            {
                "prompt": stats.prompt_tokens,
                "cached": stats.cached_prompt_tokens,
                "output": meter.output_tokens,
            },
        )
        yield self._counter("phase_seconds", "Time of the engine's loop.", "phase", meter.phase_s)
        for name, text, value in (
            ("steps", "Steps that computed something.", stats.steps),
            ("scheduled_tokens", "Tokens computed, recomputation and padding included.", launched),
            ("wasted_tokens", "Computed tokens that nothing came of, padding included.", wasted),
            ("padding_tokens", "Those of them that only filled a graph or a batch up.", padding),
            ("drafted_tokens", "Tokens that speculation guessed.", stats.drafted_tokens),
            ("accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens),
            ("swapped_blocks", "KV blocks copied to host memory.", stats.swapped_blocks),
            ("sequence_steps", "Sequences of each step, summed.", meter.sequence_steps),
            ("preemptions", "Sequences that lost their blocks to others.", stats.preemptions),
        ):
            yield self._counter(name, text, None, {"": value})
        for name, text, distribution in (
            ("time_to_first_token_seconds", "From arrival in the engine.", meter.time_to_first_token),
            (
                "inter_token_seconds",
                "Between two tokens of a request; several that came at once share their wait.",
                meter.inter_token,
            ),
            ("queue_seconds", "Waiting in the engine for a slot.", meter.queue),
            ("prefill_seconds", "From the first chunk to the first token.", meter.prefill),
            ("decode_seconds", "From the first token to the last.", meter.decode),
            ("step_seconds", "Of one step.", meter.step),
        ):
            yield self._histogram(name, text, distribution)
        for name, text, value in (
            ("running", "Requests that are being computed.", stats.running),
            ("waiting", "Requests that wait for a slot or for blocks.", stats.waiting),
            ("slots", "Requests that may run at once.", meter.max_num_seqs),
            ("rung", "How far the engine has gone to keep its latency targets, 0 to 5.", stats.rung),
            ("peak_memory_bytes", "Most memory of the process so far.", peak_memory_bytes()),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        blocks = GaugeMetricFamily(_PREFIX + "kv_blocks", "KV blocks by state.", labels=["model", "state"])
        free = stats.kv_blocks_total - stats.kv_blocks_used - stats.kv_blocks_cached
        for state, count in (
            ("used", stats.kv_blocks_used),
            ("cached", stats.kv_blocks_cached),
            ("free", free),
        ):
            blocks.add_metric([self._model, state], count)
        yield blocks

    def _counter(
        self, name: str, text: str, label: str | None, values: dict[str, float] | dict[str, int]
    ) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model", *([label] if label else [])])
        for value, count in values.copy().items():
            family.add_metric([self._model, *([value] if label else [])], count)
        return family

    def _histogram(self, name: str, text: str, distribution: Distribution) -> Metric:
        counts = itertools.accumulate(distribution.counts)
        bounds = [*map(str, distribution.bounds), "+Inf"]
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model"])
        family.add_metric([self._model], list(zip(bounds, counts, strict=True)), distribution.sum)
        return family
