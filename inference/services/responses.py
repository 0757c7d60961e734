"""Stored responses: kept for their tenant so that they can be fetched, continued and deleted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
from asgiref.sync import sync_to_async
from django.conf import settings
from django.utils import timezone

from inference.errors import NotFound
from inference.models import StoredResponse
from inference.schemas.response_answers import ResponseObject
from tenants.counting import counted
from tenants.principal import Principal

_ID: Final = re.compile(r"resp-[0-9a-f]{32}")
_SWEEP_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response, as values."""

    tenant_id: int
    model: str
    """Whose queue its generation is in."""
    items: list[dict[str, Any]]
    """The whole conversation before the answer."""
    num_own_items: int
    response: ResponseObject
    is_final: bool

    def conversation(self) -> list[dict[str, Any]]:
        """What comes before the next response: the answer included."""
        answer: list[dict[str, Any]] = msgspec.to_builtins(self.response.output)
        return [*self.items, *answer]


@sync_to_async
def keep_response(kept: Kept) -> None:
    """Idempotent; what has ended once stays as it is."""
    # As bytes: PostgreSQL's JSON can't hold U+0000, which a model or a client may well write.
    body = msgspec.json.encode(kept.response)
    row, is_new = StoredResponse.objects.get_or_create(
        tenant_id=kept.tenant_id,
        response_id=kept.response.id,
        defaults={
            "model": kept.model,
            "is_final": kept.is_final,
            "items": msgspec.json.encode(kept.items),
            "num_own_items": kept.num_own_items,
            "body": body,
            "expires_at": timezone.now() + timedelta(days=settings.RESPONSE_DAYS),
        },
    )
    if not is_new:
        rows = StoredResponse.objects.filter(tenant_id=kept.tenant_id, pk=row.pk, is_final=False)
        rows.update(is_final=kept.is_final, body=body)


@sync_to_async
def find_response(principal: Principal, response_id: str) -> Kept:
    """Raises NotFound, for another tenant's as for none."""
    row = None
    if _ID.fullmatch(response_id):
        live = StoredResponse.objects.filter(tenant_id=principal.tenant_id, expires_at__gt=timezone.now())
        row = live.filter(response_id=response_id).first()
    if row is None:
        raise NotFound(
            f"There is no response '{response_id[:80]}': it was not stored (leave 'store' on for that), was deleted, "
            f"or is older than {counted(settings.RESPONSE_DAYS, 'day')}.",
            code="response_not_found",
            param="response_id",
        )
    return Kept(
        tenant_id=row.tenant_id,
        model=row.model,
        items=msgspec.json.decode(bytes(row.items)),
        num_own_items=row.num_own_items,
        response=msgspec.json.decode(bytes(row.body), type=ResponseObject),
        is_final=row.is_final,
    )


@sync_to_async
def delete_response(principal: Principal, response_id: str) -> None:
    StoredResponse.objects.filter(tenant_id=principal.tenant_id, response_id=response_id).delete()


def delete_expired_responses() -> int:
    """Whosever they are, some at a time, so that no transaction grows long. Returns how many."""
    deleted = 0
    while True:
        expired = StoredResponse.unscoped.filter(expires_at__lte=timezone.now())
        ids = list(expired.values_list("pk", flat=True)[:_SWEEP_ROWS])
        StoredResponse.unscoped.filter(pk__in=ids).delete()
        deleted += len(ids)
        if len(ids) < _SWEEP_ROWS:
            return deleted
