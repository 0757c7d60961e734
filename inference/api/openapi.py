"""`GET /v1/openapi.json`: the API as an OpenAPI 3.1 document, made of the routes and of the structs that check them.

Nothing here repeats what a view or a schema says: a new route or field is in the document by itself. The frames
of the websocket are among its components, named by `x-weir-websockets`. The operator's routes have a tag and security
schemes of their own.
Source: OpenAPI Specification 3.1.1; JSON Schema 2020-12, which msgspec writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, URLResolver

from inference.api.description import Operation, Operators
from inference.api.schema_components import Schemas
from inference.schemas import chat_socket
from inference.schemas.errors import AnthropicErrorAnswer, ErrorAnswer
from tenants.principal import Scope

_PLACE: Final = re.compile(r"<(?:\w+:)?(\w+)>")
_SERVER_FRAMES: Final = (
    chat_socket.Started
    | chat_socket.Delta
    | chat_socket.UsageFrame
    | chat_socket.Done
    | chat_socket.ErrorFrame
)
HEADERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Idempotency-Key": (
        "The same key with the same body is the same request: asked again within 24 hours, also while it runs, "
        "it gives the same answer and is charged once.",
        {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    ),
    "x-weir-deadline-s": (
        "Seconds from acceptance to the last token, never more than the tier's.",
        {"type": "integer", "minimum": 1},
    ),
    "x-weir-resume-grace": (
        "So many seconds an answer goes on whose connection broke.",
        {"type": "integer", "minimum": 0, "maximum": 120},
    ),
    "Last-Event-ID": (
        "The id of the last event that was read.",
        {"type": "string", "pattern": r"^\d{1,9}(\.[123])?$"},
    ),
}
"""Of requests."""
_ANSWER_HEADERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "x-request-id": ("Yours, if it is well-formed, or one of ours: in every answer.", {"type": "string"}),
    "Retry-After": ("Seconds.", {"type": "integer", "minimum": 1}),
    "retry-after-ms": ("The same in milliseconds.", {"type": "integer", "minimum": 0}),
    "x-ratelimit-limit-requests": ("Of the limit with the least left.", {"type": "integer"}),
    "x-ratelimit-remaining-requests": ("What is left of it.", {"type": "integer"}),
    "x-ratelimit-reset-requests": ("When it is full again: `12ms`, `1.5s`, `6m0s`.", {"type": "string"}),
    "x-ratelimit-limit-tokens": ("Of the limit with the least left.", {"type": "integer"}),
    "x-ratelimit-remaining-tokens": ("What is left of it.", {"type": "integer"}),
    "x-ratelimit-reset-tokens": ("When it is full again.", {"type": "string"}),
    "x-weir-queue-ms": (
        "Milliseconds in the queue, the longest of several; not of a stream that began before its first token.",
        {"type": "integer", "minimum": 0},
    ),
    "x-weir-tier": ("The tier in which the request went.", {"type": "string"}),
    "x-weir-limit-scope": ("Whose limit it is.", {"enum": ["tier", "tenant", "model", "key"]}),
}
_REASONS: Final = {
    400: "Something in the request is wrong: `param` names the field.",
    401: "No key, or not a valid one.",
    403: "Who asks may not do this.",
    404: "There is no such thing.",
    409: "It is in a state that does not allow this, or was changed at the same moment.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is of the wrong kind.",
    422: "The idempotency key was used with another body.",
    429: "A limit or a budget binds: the message says which, and when this request fits.",
    500: "The server failed.",
    503: "The queue is full, or a part of the service is down.",
    504: "The deadline passed half way.",
    529: "The queue is full, or a part of the service is down.",
}


_SECURITY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "operatorToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The operator's WEIR_OPERATOR_TOKEN.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "sessionid",
        "description": "Of who has signed in: a superuser, or where it says so the operator's staff.",
    },
    "csrfToken": {
        "type": "apiKey",
        "in": "header",
        "name": "X-CSRFToken",
        "description": "Django's, with each change that comes by a session.",
    },
}
Routes = Mapping[str, Sequence[URLPattern | URLResolver]]
"""By the path that they are under."""


class ApiDocument:
    """The document of `routes`, made at first use."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    @cached_property
    def body(self) -> bytes:
        return msgspec.json.encode(self.value)

    @cached_property
    def value(self) -> dict[str, Any]:
        operations = list(operations_of(self._routes))
        schemas = Schemas([*_types_of(operation for _, operation in operations)])
        paths: dict[str, dict[str, Any]] = {}
        for path, operation in operations:
            paths.setdefault(path, {})[operation.method.lower()] = _described(path, operation, schemas)
        return {
            "openapi": "3.1.1",
            "info": {
                "title": "Weir",
                "version": "1",
                "description": "Chat completions, completions, responses, embeddings, files and batches as OpenAI has "
                "them, messages as Anthropic has them, and what is Weir's own.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/"}],
            "security": [{"bearer": []}],
            "paths": paths,
            "components": {
                "securitySchemes": _SECURITY_SCHEMES,
                "headers": {
                    name: {"description": text, "schema": schema, "required": name == "x-request-id"}
                    for name, (text, schema) in _ANSWER_HEADERS.items()
                },
                "schemas": schemas.components,
            },
            "x-weir-websockets": {
                "/ws/chat": {
                    "description": "The console's chat: JSON text frames, several generations on one socket.",
                    "client": schemas.of(chat_socket.ClientFrame),
                    "server": schemas.of(_SERVER_FRAMES),
                }
            },
        }

    async def serve(self, request: HttpRequest) -> HttpResponse:
        """Asks for no key: what it says is in the public docs."""
        return HttpResponse(self.body, content_type="application/json")


def operations_of(routes: Routes) -> Iterator[tuple[str, Operation]]:
    for under, patterns in routes.items():
        for route in patterns:
            path = under + _PLACE.sub(r"{\1}", str(route.pattern))
            for operation in getattr(getattr(route, "callback", None), "operations", ()):
                yield path, operation


def _types_of(operations: Iterable[Operation]) -> Iterator[Any]:
    yield from (ErrorAnswer, AnthropicErrorAnswer, chat_socket.ClientFrame, _SERVER_FRAMES)
    for operation in operations:
        for kind in (operation.body, operation.form, operation.query, operation.answer, *operation.events):
            if kind is not None and kind is not bytes:
                yield kind


def _described(path: str, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(path, operation),
        "summary": operation.summary,
        **_access(operation),
        "tags": ["operator" if isinstance(operation.scope, Operators) else path.split("/")[2]],
        "parameters": [*_parameters(path, operation, schemas)],
        "responses": _responses(operation, schemas),
    }
    if operation.body is not None:
        described["requestBody"] = _request_body("application/json", schemas.of(operation.body))
    elif operation.form is not None:
        described["requestBody"] = _request_body("multipart/form-data", schemas.of(operation.form))
    return described


def _access(operation: Operation) -> dict[str, Any]:
    session: dict[str, list[str]] = {"session": []}
    if operation.method != "GET":
        session["csrfToken"] = []
    match operation.scope:
        case Operators.STAFF:
            return {"description": "For the operator's staff.", "security": [session]}
        case Operators.SUPERUSERS:
            return {
                "description": "For the operator: superusers, and programs with the operator's token.",
                "security": [{"operatorToken": []}, session],
            }
        case scope:
            return {"description": f"Needs a key with the scope `{scope}`."}


def _operation_id(path: str, operation: Operation) -> str:
    words = [word for word in re.split(r"\W+", path.removeprefix("/v1/")) if word]
    return "_".join([operation.method.lower(), *words])


def _request_body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _parameters(path: str, operation: Operation, schemas: Schemas) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", path):
        schema = {"type": "string", "minLength": 1, "maxLength": 256}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    if operation.query is not None:
        struct = schemas.components[operation.query.__name__]
        for name, schema in struct["properties"].items():
            described = {"name": name, "in": "query", "schema": schema}
            if name in struct.get("required", ()):
                described["required"] = True
            if text := schema.get("description"):
                described["description"] = text
            yield described
    for name in operation.headers:
        text, schema = HEADERS[name]
        yield {"name": name, "in": "header", "description": text, "schema": schema}


def _responses(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is bytes:
        content |= {media: {"schema": {"type": "string", "format": "binary"}} for media in operation.media}
    elif operation.answer is not None:
        content["application/json"] = {"schema": schemas.of(operation.answer)}
    if operation.events:
        # OpenAPI 3.1 has no word for the payload of a stream's events.
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-weir-event-data": {"anyOf": [schemas.of(kind) for kind in operation.events]},
        }
    names = ["x-request-id"]
    if isinstance(operation.scope, Scope):
        names.append("x-weir-tier")
    if operation.generates:
        names += [name for name in _ANSWER_HEADERS if name.startswith(("x-ratelimit", "x-weir-queue"))]
    good = {"description": "Done.", "headers": _headers(names), "content": content}
    error = schemas.of(AnthropicErrorAnswer if operation.is_anthropic else ErrorAnswer)
    return {str(operation.status): good} | {
        str(status): {
            "description": _REASONS[status],
            "headers": _headers(
                ["x-request-id", *(["Retry-After", "retry-after-ms"] if status in (429, 503, 529) else [])]
            ),
            "content": {"application/json": {"schema": error}},
        }
        for status in operation.error_statuses
    }


def _headers(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
