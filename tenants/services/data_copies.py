"""Copies of a tenant's data, for its owners: a ZIP with one file of JSON lines for each kind of row.

What is secret stays here (digests, secrets of webhooks), and so do the conversations of the chat, which are their
person's alone. Contents of files are fetched by /v1/files.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from datetime import datetime, timedelta
from typing import Any, Final, cast

import structlog
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, models, transaction
from django.db.models import F, Q
from django.utils import timezone

from tenants.large_reads import some_at_a_time
from tenants.models import DataCopy, DataCopyFile, DataCopyState, Tenant
from tenants.scope import TenantScopedManager
from tenants.services.audit import Actor, record_audit

log = structlog.get_logger(__name__)

_KEPT: Final = timedelta(days=7)
_ABANDONED: Final = timedelta(minutes=10)
_ATTEMPTS: Final = 3
_BYTES_MAX: Final = 256 * 1024 * 1024
_PRIVATE: Final = {"inference.Conversation", "inference.Exchange", "inference.IdempotentRequest"}
_SECRET: Final = ("secret", "digest")
_OPEN: Final = (DataCopyState.QUEUED, DataCopyState.RUNNING)


class _TooLarge(Exception):
    """The ZIP would not fit where it is kept."""


@transaction.atomic
def ask_for_copy(*, actor: Actor, tenant: Tenant) -> DataCopy:
    """The copy that will be written; one that waits already is the same."""
    Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
    waiting = DataCopy.objects.for_tenant(tenant).filter(state__in=_OPEN).first()
    if waiting is not None:
        return waiting
    copy = DataCopy.objects.create(tenant=tenant, requested_by=actor.label, expires_at=timezone.now() + _KEPT)
    record_audit(actor=actor, action="tenant.copy_asked_for", tenant=tenant, target=copy)
    return copy


def list_copies(tenant: Tenant) -> list[DataCopy]:
    return list(DataCopy.objects.for_tenant(tenant).filter(expires_at__gt=timezone.now())[:20])


@transaction.atomic
def fetch_copy(*, actor: Actor, tenant: Tenant, public_id: Any) -> bytes | None:
    """The ZIP, and the record of who took it. None for one that is absent, not written, or another tenant's."""
    copies = DataCopy.objects.for_tenant(tenant).filter(expires_at__gt=timezone.now())
    copy = copies.filter(public_id=public_id, state=DataCopyState.DONE).select_related("file").first()
    if copy is None:
        return None
    record_audit(actor=actor, action="tenant.copy_fetched", tenant=tenant, target=copy)
    return bytes(copy.file.content)


def write_copies(now: datetime | None = None) -> int:
    """Writes what waits, and forgets what has expired; any number may run at once. Says how many were written."""
    now = now or timezone.now()
    DataCopy.unscoped.filter(expires_at__lte=now).delete()
    written = 0
    while (copy := _claim(now)) is not None:
        written += _write(copy)
    return written


@transaction.atomic
def _claim(now: datetime) -> DataCopy | None:
    due = Q(state=DataCopyState.QUEUED) | Q(state=DataCopyState.RUNNING, started_at__lt=now - _ABANDONED)
    rows = DataCopy.unscoped.select_for_update(skip_locked=True, of=("self",)).select_related("tenant")
    copy = rows.filter(due).order_by("id").first()
    if copy is not None:
        copy.state, copy.started_at = DataCopyState.RUNNING, timezone.now()
        DataCopy.objects.filter(tenant=copy.tenant, pk=copy.pk).update(
            state=copy.state, started_at=copy.started_at, attempts=F("attempts") + 1
        )
    return copy


def _write(copy: DataCopy) -> bool:
    try:
        if copy.attempts >= _ATTEMPTS:
            raise _TooLarge
        content, rows = _zip(copy.tenant)
    except Exception:
        log.exception("data_copy_failed", copy=str(copy.public_id))
        _end(copy, state=DataCopyState.FAILED)
        return False
    with transaction.atomic():
        if not _end(copy, state=DataCopyState.DONE, rows=rows):
            return False
        DataCopyFile.objects.create(copy=copy, content=content)
    return True


def _end(copy: DataCopy, **values: Any) -> bool:
    """False where another has taken it over meanwhile."""
    mine = DataCopy.objects.filter(
        tenant=copy.tenant, pk=copy.pk, state=DataCopyState.RUNNING, started_at=copy.started_at
    )
    return mine.update(finished_at=timezone.now(), **values) == 1


def _zip(tenant: Tenant) -> tuple[bytes, int]:
    count = 0
    with tempfile.TemporaryFile() as file:
        with transaction.atomic():
            with connection.cursor() as cursor:
                # Its tables are read one after the other, and show one moment all the same.
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for model in _models():
                    with archive.open(f"{model.__name__}.jsonl", "w", force_zip64=True) as table:
                        for row in _rows(model, tenant):
                            table.write(json.dumps(row, cls=DjangoJSONEncoder).encode() + b"\n")
                            count += 1
                        if file.tell() > _BYTES_MAX:
                            raise _TooLarge
        file.seek(0)
        return file.read(), count


def _models() -> list[type[models.Model]]:
    """Every model with a tenant, of whichever app: a new one is in the copy without being named here.

    A row that names several tenants belongs to none of them: it is the operator's.
    """
    related = [
        relation.related_model
        for relation in Tenant._meta.get_fields(
            include_hidden=True
        )  # those without a name on the tenant, too
        if isinstance(relation, models.ManyToOneRel) and not relation.related_model._meta.auto_created
    ]
    kept = {model for model in related if model._meta.label not in _PRIVATE and model is not DataCopy}
    return sorted(kept, key=lambda model: model.__name__)


def _rows(model: type[models.Model], tenant: Tenant) -> Any:
    names = [
        field.attname
        for field in model._meta.concrete_fields
        if not isinstance(field, models.BinaryField) and not any(word in field.name for word in _SECRET)
    ]
    manager = cast(TenantScopedManager[Any], model.objects)  # type: ignore[attr-defined]
    return some_at_a_time(manager.for_tenant(tenant).order_by("pk").values(*names), chunk_size=1000)
