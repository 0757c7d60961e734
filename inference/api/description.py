"""What a route takes and gives, said beside its view: the OpenAPI document is made of this (openapi.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tenants.principal import Scope

_ALWAYS: Final = (400, 403, 500, 503)
_OF_A_BODY: Final = (408, 413, 415)
_OF_A_CHANGE: Final = (409,)
_OF_A_GENERATION: Final = (404, 422, 429, 504)


class Operators(StrEnum):
    """Whom a route opens to that is not for keys."""

    STAFF = "staff"
    """By their session."""
    SUPERUSERS = "superusers"
    """By their session, and programs by WEIR_OPERATOR_TOKEN."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. Types are msgspec structs or dataclasses, or unions of them."""

    method: str
    scope: Scope | Operators
    """What a key needs; or who it is for instead of keys."""
    view: Callable[..., Any]
    """Its docstring says in a line what the operation does."""
    body: Any = None
    form: Any = None
    """A body of multipart/form-data instead."""
    query: type | None = None
    answer: Any = None
    """`bytes` is a file, of one of the `media`."""
    media: tuple[str, ...] = ("application/octet-stream",)
    status: int = 200
    events: tuple[Any, ...] = ()
    """What the data of its server-sent events is, where it can stream or does nothing else."""
    headers: tuple[str, ...] = ()
    """Those of the request that mean something here, by name: see HEADERS in openapi.py."""
    generates: bool = False
    """Passes the limits and the queue."""
    errors: tuple[int, ...] = ()
    """Statuses besides those that its kind of operation always may have."""
    is_anthropic: bool = False

    @property
    def summary(self) -> str:
        return (self.view.__doc__ or "").strip().partition("\n")[0]

    @property
    def error_statuses(self) -> list[int]:
        statuses = {*_ALWAYS, *self.errors}
        if isinstance(self.scope, Scope):
            statuses.add(401)
        if self.body is not None or self.form is not None:
            statuses.update(_OF_A_BODY)
        if self.method != "GET":
            statuses.update(_OF_A_CHANGE)
        if self.generates:
            statuses.update(_OF_A_GENERATION)
        if self.is_anthropic:  # its own way to say 503
            statuses = statuses - {503} | {529}
        return sorted(statuses)
