"""A tenant's files: uploaded by it, or written by its batches."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

import uuid_utils
from django.conf import settings
from django.db.models import Q, QuerySet, Sum
from django.utils import timezone

from inference.errors import InvalidRequest, NotFound, TooLarge
from inference.models import Batch, StoredFile
from inference.models.batch import OPEN
from tenants.principal import Principal

_ID: Final = re.compile(r"file-[0-9a-f]{32}")


def store_file(
    *, tenant_id: int, filename: str, purpose: str, content: bytes, expires_after_s: int | None = None
) -> StoredFile:
    expires_at = timezone.now() + timedelta(seconds=expires_after_s) if expires_after_s else None
    return StoredFile.objects.create(
        tenant_id=tenant_id,
        file_id=f"file-{uuid_utils.uuid7().hex}",
        filename=filename,
        purpose=purpose,
        num_bytes=len(content),
        content=content,
        expires_at=expires_at,
    )


def upload_file(
    principal: Principal, *, filename: str, content: bytes, expires_after_s: int | None
) -> StoredFile:
    """Raises InvalidRequest, TooLarge."""
    limit = settings.FILE_MAX_MB << 20
    if len(content) > limit:
        raise TooLarge(
            f"The file has {len(content):,} bytes: at most {limit:,} are taken. Split it.",
            code="file_too_large",
            param="file",
        )
    if not content:
        raise InvalidRequest("The file is empty: give at least one line.", param="file")
    kept = live_files(principal.tenant_id).aggregate(total=Sum("num_bytes", default=0))["total"]
    room = settings.FILES_PER_TENANT_MB << 20
    if kept + len(content) > room:
        raise InvalidRequest(
            f"Your files have {kept:,} bytes, and with this one more than {room:,}: delete some.",
            code="storage_full",
            param="file",
        )
    return store_file(
        tenant_id=principal.tenant_id,
        filename=filename.replace("\0", "")[-255:] or "file",
        purpose="batch",
        content=content,
        expires_after_s=expires_after_s,
    )


def live_files(tenant_id: int) -> QuerySet[StoredFile]:
    """Without their content, which can be large."""
    is_live = Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
    return StoredFile.objects.filter(tenant_id=tenant_id).filter(is_live).defer("content")


def find_file(
    principal: Principal, file_id: str, *, param: str = "file_id", with_content: bool = False
) -> StoredFile:
    """Raises NotFound, for another tenant's as for none."""
    rows = live_files(principal.tenant_id)
    if with_content:
        rows = rows.defer(None)  # in this query: before another one it may be deleted
    row = rows.filter(file_id=file_id).first() if _ID.fullmatch(file_id) else None
    if row is None:
        raise NotFound(
            f"There is no file '{file_id[:80]}'. GET /v1/files lists yours.",
            code="file_not_found",
            param=param,
        )
    return row


def read_file(principal: Principal, file_id: str) -> bytes:
    return bytes(find_file(principal, file_id, with_content=True).content)


def delete_file(principal: Principal, file_id: str) -> None:
    row = find_file(principal, file_id)
    if Batch.objects.filter(tenant_id=principal.tenant_id, input_file_id=file_id, status__in=OPEN).exists():
        raise InvalidRequest("A batch still reads this file: cancel it first.", param="file_id")
    StoredFile.objects.filter(tenant_id=principal.tenant_id, pk=row.pk).delete()


def delete_expired_files() -> None:
    StoredFile.unscoped.filter(expires_at__lte=timezone.now()).delete()
