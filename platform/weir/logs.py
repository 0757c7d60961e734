"""Logs: a stable event name plus fields, one line each, with the id of the request that they belong to.

Prompts, completions and secrets are never logged: what looks like one is masked on the way out.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import uuid_utils
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

REQUEST_ID_HEADER: Final = "X-Request-Id"
_CLIENT_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET: Final = re.compile(r"(?i)\b(bearer\s+|wk_|sk-|wr_|weir_)[A-Za-z0-9._~+/=-]{6,}")
_URL_PASSWORD: Final = re.compile(r"([\w+]+://[^:/@\s]*:)[^@/\s]+@")
_NEVER_LOGGED: Final = frozenset(
    {
        "api_key", "authorization", "completion", "content", "cookie", "messages", "password", "prompt",
        "prompt_token_ids", "secret", "text", "token",
    }
)  # fmt: skip
_MASK: Final = "[masked]"


def mask(text: str) -> str:
    """`text` without what looks like a key or a password."""
    return _URL_PASSWORD.sub(rf"\1{_MASK}@", _SECRET.sub(rf"\1{_MASK}", text))


def mask_event(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A structlog processor: masks fields by name, and everything else by how it looks."""
    for name, value in event.items():
        if name in _NEVER_LOGGED:
            event[name] = _MASK
        elif isinstance(value, str):
            event[name] = mask(value)
    return event


def logging_config(*, as_json: bool, level: str) -> dict[str, Any]:
    """Django's LOGGING: structlog's own events and the standard library's in one format, to standard error."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "event"], bool_as_flag=False
        )
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "weir": {
                "()": structlog.stdlib.ProcessorFormatter,
                "foreign_pre_chain": shared,
                "processors": [
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    mask_event,
                    renderer,
                ],
            }
        },
        "handlers": {"stderr": {"class": "weir.logs.StandardErrorHandler", "formatter": "weir"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            # Django's own configuration gives these handlers of their own: one line per event is enough.
            "django": {"handlers": [], "level": level, "propagate": True},
            "django.server": {"handlers": [], "level": "WARNING", "propagate": True},
            "daphne": {"level": "WARNING"},
            "django.request": {"level": "ERROR"},  # a 4xx is the client's affair
            "celery.app.trace": {"level": "WARNING"},  # two lines per task
            "celery.worker.strategy": {"level": "WARNING"},
            "httpx": {"level": "WARNING"},
            # psycopg gives itself a level when it is imported without one, whatever the root's is.
            "psycopg": {"level": level if level == "ERROR" else "WARNING"},
        },
    }


class StandardErrorHandler(logging.Handler):
    """Writes to what standard error is now, not to what it was when logging was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def name_request(request: HttpRequest) -> str:
    """Its id, from now on in each line of the log: the client's own where it is harmless, else a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request_id = given if _CLIENT_REQUEST_ID.fullmatch(given) else uuid_utils.uuid4().hex
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)
    return request_id


class RequestIdMiddleware:
    """Names the request in logs and in the answer."""

    async_capable = True
    sync_capable = False

    def __init__(self, get_response: Callable[[HttpRequest], Awaitable[HttpResponseBase]]) -> None:
        self._get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        request_id = name_request(request)
        response = await self._get_response(request)
        if REQUEST_ID_HEADER not in response.headers:
            response.headers[REQUEST_ID_HEADER] = request_id
        return response
