"""The gateway's span of one generation, and what travels with its request over Redis.

Without an SDK (see weir/tracing.py) OpenTelemetry's API makes spans that do nothing. Attributes follow its GenAI
conventions; the prompt and the answer are never among them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import structlog
from django.conf import settings
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_worker.protocol import Finish, FinishReason, SamplingParams

TRACER: Final = trace.get_tracer("weir.gateway")
REQUEST_ID: Final = "x-request-id"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_OPERATIONS: Final = {"completions": "text_completion", "embeddings": "embeddings"}


def span(name: str) -> AbstractContextManager[Any]:
    """Of what is done inside. OpenTelemetry's API takes its time even where nothing is traced."""
    return TRACER.start_as_current_span(name) if settings.TRACING else nullcontext()


def start_generation_span(
    *,
    request_id: str,
    model: str,
    endpoint: str,
    sampling: SamplingParams,
    prompt_tokens: int,
    context: Context,
) -> Span:
    """From now to the last chunk; below the span of `context`."""
    operation = _OPERATIONS.get(endpoint, "chat")
    span = TRACER.start_span(f"{operation} {model}", context, kind=SpanKind.CLIENT)
    if span.is_recording():
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "weir",
                "gen_ai.request.model": model,
                "gen_ai.response.id": request_id,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "weir.endpoint": endpoint,
            }
        )
    return span


def carrier(span: Span) -> dict[str, str]:
    """W3C Trace Context of a span that records, and the id by which the client and our logs know the HTTP request."""
    headers: dict[str, str] = {}
    if span.is_recording():
        _PROPAGATOR.inject(headers, trace.set_span_in_context(span))
    if request_id := structlog.contextvars.get_contextvars().get("request_id"):
        headers[REQUEST_ID] = str(request_id)
    return headers


def end_generation_span(span: Span, finish: Finish | None) -> None:
    """None: the client left, and nobody heard the end. May be called again."""
    if not span.is_recording():
        return
    reason = finish.reason if finish else FinishReason.CANCELLED
    span.set_attribute("gen_ai.response.finish_reasons", [reason])
    if finish is not None:
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": finish.prompt_tokens,
                "gen_ai.usage.output_tokens": finish.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
            }
        )
    if reason == FinishReason.ERROR:
        code = finish.error.code if finish and finish.error else "engine_failed"
        span.set_attribute("error.type", code)
        span.set_status(Status(StatusCode.ERROR, code))
    span.end()
