"""Idempotency keys: the same key with the same body is the same request, whenever and wherever it is asked.

The first one writes a row with the id that its request will have, before anything is reserved. Who comes
second takes the request up from its token log, or gets the answer from the row once it is whole. A failure is
not kept: the same key tries again, at once where what failed before had cost nothing.
Source: IETF draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import uuid_utils
from asgiref.sync import sync_to_async
from django.utils import timezone

from engine_worker.protocol import Finish, FinishReason
from inference.errors import Conflict, GenerationFailed, NotFound, Unprocessable
from inference.models import IdempotentRequest
from inference.runtime import Runtime
from inference.selectors import Past, past_of
from inference.services.generation import Generation
from inference.services.resume import find_request, resume
from inference.services.submission import Submission
from inference.services.submit import submit
from tenants.principal import Principal

KEPT: Final = timedelta(hours=24)
_SWEEP_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class Claim:
    """A request with an idempotency key."""

    tenant_id: int
    row_id: int
    request_hex: str
    is_repeat: bool
    """Somebody asked it before: it may run, or have run."""
    content_type: str = ""
    """Where the answer is there already, what it is."""
    body: bytes = b""


class RefusedBefore(Conflict):
    """What the id stood for has ended without an answer and without a charge: to be asked anew, by another id."""

    def __init__(self) -> None:
        super().__init__("What was asked with this key before was refused. Ask again.", code="refused_before")


@sync_to_async
def claim_request(principal: Principal, key: str, asked: bytes) -> Claim:
    """`asked`: the route and the body. Raises Unprocessable for a key that stands for something else."""
    assert principal.key_public_id is not None
    rows = IdempotentRequest.objects.filter(tenant_id=principal.tenant_id)
    names = {
        "key_public_id": principal.key_public_id,
        "key_digest": hashlib.sha256(key.encode()).hexdigest(),
    }
    rows.filter(expires_at__lte=timezone.now(), **names).delete()
    digest = hashlib.sha256(asked).hexdigest()
    row, is_new = rows.get_or_create(
        tenant_id=principal.tenant_id,
        **names,
        defaults={
            "body_digest": digest,
            "request_hex": uuid_utils.uuid7().hex,
            "expires_at": timezone.now() + KEPT,
        },
    )
    if row.body_digest != digest:
        raise Unprocessable(
            "This Idempotency-Key was used with another request in the last 24 hours: give each its own.",
            code="idempotency_key_reused",
        )
    return Claim(row.tenant_id, row.pk, row.request_hex, not is_new, row.content_type, bytes(row.body))


@sync_to_async
def keep_answer(claim: Claim, *, content_type: str, body: bytes) -> None:
    """Once: what was kept first stays."""
    rows = IdempotentRequest.objects.filter(tenant_id=claim.tenant_id, pk=claim.row_id, content_type="")
    rows.update(content_type=content_type, body=body)


@sync_to_async
def forget_claim(claim: Claim) -> None:
    """The same key may try again."""
    IdempotentRequest.objects.filter(tenant_id=claim.tenant_id, pk=claim.row_id, content_type="").delete()


async def submit_once(runtime: Runtime, principal: Principal, asked: Submission) -> Generation:
    """`submit`, unless the request `may_exist` and does: then that one, from its first token.

    Raises RefusedBefore besides.
    """
    if not asked.may_exist:
        return await submit(runtime, principal, asked)
    try:
        model, state = await find_request(runtime, principal, asked.request_id)
        if state.finish is not None and _was_for_nothing(state.finish):
            raise RefusedBefore
        return await resume(runtime, principal, asked.request_id, model=model)
    except NotFound:
        pass
    past = await sync_to_async(past_of)(principal.tenant_id, asked.request_id)
    if past is Past.ANSWERED:
        lost = GenerationFailed(
            "The request has run, but its answer was lost. Ask again to run it anew.", code="result_lost"
        )
        lost.is_end = True
        raise lost
    if past is Past.REFUSED:
        raise RefusedBefore
    try:
        return await submit(runtime, principal, asked)
    except Conflict:
        try:
            # Another gateway was faster by a moment.
            return await resume(runtime, principal, asked.request_id)
        except NotFound:
            raise RefusedBefore from None


def _was_for_nothing(finish: Finish) -> bool:
    """It failed before its first token; who had it cancelled is told so once more."""
    is_failed = finish.reason in (FinishReason.ERROR, FinishReason.DEADLINE)
    return is_failed and finish.completion_tokens == 0


def delete_expired_requests() -> None:
    """Whosever they are, some at a time, so that no transaction grows long."""
    while True:
        expired = IdempotentRequest.unscoped.filter(expires_at__lte=timezone.now())
        ids = list(expired.values_list("pk", flat=True)[:_SWEEP_ROWS])
        IdempotentRequest.unscoped.filter(pk__in=ids).delete()
        if len(ids) < _SWEEP_ROWS:
            return
