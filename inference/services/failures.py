"""What the log says of requests that failed for good, whichever process saw their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from engine_worker.protocol import FinishReason, UsageEvent

log = structlog.get_logger(__name__)

_CLIENTS_FAULT: Final = "invalid_request"
"""Such an error may repeat what the client sent."""
_REASON_MAX: Final = 300


def tell_of_failures(events: Sequence[UsageEvent]) -> None:
    """A line for each: what the client was told, and after how many attempts. Again where an event comes again."""
    for event in events:
        if event.finish_reason == FinishReason.ERROR and event.error_code != _CLIENTS_FAULT:
            log.error(
                "request_failed",
                request_id=event.request_id,
                tenant=event.tenant_id,
                model=event.model,
                code=event.error_code,
                reason=(event.error_message or "")[:_REASON_MAX],
                attempts=event.attempts,
                last_worker=event.worker_id,
                completion_tokens=event.completion_tokens,
            )
