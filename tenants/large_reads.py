"""Reads of more rows than memory should hold at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from django.db import connections
from django.db.models import QuerySet

_Row = TypeVar("_Row")


def some_at_a_time(rows: QuerySet[Any, _Row], *, chunk_size: int = 2000) -> Iterator[_Row]:
    """By a cursor in the server, which ends with the transaction that it must be in.

    Django's own would outlive it (`WITH HOLD`), and the session that a pooler in transaction mode lends does not:
    therefore DISABLE_SERVER_SIDE_CURSORS is set for whatever else iterates, such as the choices of a form.
    """
    assert connections[rows.db].in_atomic_block
    found: Iterator[_Row] = rows._iterator(use_chunked_fetch=True, chunk_size=chunk_size)  # type: ignore[attr-defined]  # not in the stubs
    return found
