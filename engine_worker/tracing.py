"""Spans of the worker: what a request waited for and where its time went, phase by phase.

The gateway sends W3C Trace Context with a request; a claim's spans hang below its span there. They are made at the end,
from times noted on the way, so that a step costs a dictionary look-up per request. OpenTelemetry's API does nothing
without its SDK (extra `tracing`); names follow its GenAI conventions where they have one. No text is ever in a span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_worker.broker import Claim
from engine_worker.engine.types import RequestOutput
from engine_worker.protocol import Chunk, FinishReason

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_TRACEPARENT: Final = "traceparent"
"""Without this header there is no trace: W3C Trace Context, 3.2."""


class TracingUnavailable(Exception):
    """Tracing is on and its packages are not there."""


def set_up(service: str) -> None:
    """Sends this process's spans by OTLP over HTTP. Where to, how many and under which name: OTEL_* variables, as
    OpenTelemetry's specification has them. Raises TracingUnavailable."""
    try:
        # Of the extra `tracing`: whoever traces nothing needs no SDK.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailable("WEIR_TRACING is on: install it by `pip install 'weir[tracing]'`") from error
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@dataclass(slots=True)
class _Noted:
    claim: Claim
    parent: Context
    claimed_ns: int
    first_token_ns: int = 0


class Phases:
    """What is known of the claims that are traced. One per worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._tracer = trace.get_tracer("weir.engine_worker")
        self._noted: dict[str, _Noted] = {}

    def claimed(self, engine_id: str, claim: Claim) -> None:
        if _TRACEPARENT not in claim.request.trace:
            return
        parent = _PROPAGATOR.extract(claim.request.trace)
        if trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            self._noted[engine_id] = _Noted(claim, parent, time.time_ns())

    def stepped(self, outputs: Iterable[RequestOutput]) -> None:
        if not self._noted:
            return
        for output in outputs:
            engine_id = output.request_id.partition("/")[0]
            if (noted := self._noted.get(engine_id)) and not noted.first_token_ns:
                noted.first_token_ns = time.time_ns()

    def finished(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if noted := self._noted.pop(f"{chunk.request_id}#{chunk.epoch}", None):
                self._tell(noted, chunk)

    def lost(self, engine_ids: Iterable[str]) -> None:
        """Another worker goes on with them."""
        for engine_id in engine_ids:
            if noted := self._noted.pop(engine_id, None):
                self._tell(noted, None)

    def _tell(self, noted: _Noted, last: Chunk | None) -> None:
        now_ns = time.time_ns()
        request = noted.claim.request
        # Two machines' clocks: nothing ends before it begins.
        queued_ns = min(request.created_at_ms * 1_000_000, noted.claimed_ns)
        if noted.claim.attempt == 1:
            self._span("queue", noted.parent, queued_ns, noted.claimed_ns, {"weir.tier": request.tier})
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "embeddings" if request.text_lengths else "text_completion",
            "gen_ai.provider.name": "weir",
            "gen_ai.request.model": request.model,
            "gen_ai.response.id": request.request_id,
            "weir.worker_id": self._worker_id,
            "weir.attempt": noted.claim.attempt,
            "weir.resumed_tokens": len(noted.claim.logged_token_ids),
        }
        finish = last.finish if last else None
        if finish is not None:
            attributes |= {
                "gen_ai.response.finish_reasons": [finish.reason],
                "gen_ai.usage.input_tokens": finish.prompt_tokens,
                "gen_ai.usage.output_tokens": finish.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
            }
        span = self._tracer.start_span(
            f"generate {request.model}",
            noted.parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=noted.claimed_ns,
        )
        if finish is None or finish.reason == FinishReason.ERROR:
            span.set_status(
                Status(StatusCode.ERROR, finish.error.code if finish and finish.error else "lost")
            )
        inside = trace.set_span_in_context(span, noted.parent)
        first_ns = noted.first_token_ns or now_ns
        self._span("prefill", inside, noted.claimed_ns, first_ns, {})
        if noted.first_token_ns:
            self._span("decode", inside, first_ns, now_ns, {})
        span.end(now_ns)

    def _span(
        self, name: str, parent: Context, start_ns: int, end_ns: int, attributes: dict[str, Any]
    ) -> None:
        self._tracer.start_span(name, parent, attributes=attributes, start_time=start_ns).end(end_ns)
