"""Batches as rows: made, found, cancelled, checked, ended. What runs their lines is batch_runner.py."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

import msgspec
import uuid_utils
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from inference.errors import Conflict, InvalidRequest, NotFound
from inference.models import Batch, BatchResult, BatchStatus, StoredFile
from inference.models.batch import OPEN
from inference.schemas.batches import BatchLine, BatchRequest
from inference.schemas.reading import read_json
from inference.services.files import find_file, store_file
from tenants.principal import Principal

LINES_MAX: Final = 50_000
_WINDOW: Final = timedelta(hours=24)
_ID: Final = re.compile(r"batch_[0-9a-f]{32}")
_OPEN_PER_TENANT: Final = 20
_ERRORS_TOLD: Final = 50


def create_batch(principal: Principal, asked: BatchRequest) -> Batch:
    """Raises InvalidRequest, NotFound."""
    find_file(principal, asked.input_file_id, param="input_file_id")
    if Batch.objects.filter(tenant_id=principal.tenant_id, status__in=OPEN).count() >= _OPEN_PER_TENANT:
        raise InvalidRequest(f"At most {_OPEN_PER_TENANT} batches may be open: wait until one ends.")
    return Batch.objects.create(
        tenant_id=principal.tenant_id,
        batch_id=f"batch_{uuid_utils.uuid7().hex}",
        key_public_id=principal.key_public_id,
        input_file_id=asked.input_file_id,
        endpoint=asked.endpoint,
        metadata=msgspec.json.encode(asked.metadata or {}),
        expires_at=timezone.now() + _WINDOW,
    )


def find_batch(principal: Principal, batch_id: str) -> Batch:
    """Raises NotFound, for another tenant's as for none."""
    rows = Batch.objects.filter(tenant_id=principal.tenant_id)
    row = rows.filter(batch_id=batch_id).first() if _ID.fullmatch(batch_id) else None
    if row is None:
        raise NotFound(
            f"There is no batch '{batch_id[:80]}'. GET /v1/batches lists yours.",
            code="batch_not_found",
            param="batch_id",
        )
    return row


def cancel_batch(principal: Principal, batch_id: str) -> Batch:
    """The runner ends it: what has ended by then is in its files. Raises NotFound, Conflict."""
    row = find_batch(principal, batch_id)
    begun = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    rows = Batch.objects.filter(tenant_id=principal.tenant_id, pk=row.pk, status__in=begun)
    if not rows.update(status=BatchStatus.CANCELLING, cancelling_at=timezone.now()):
        row.refresh_from_db()
        if row.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise Conflict(
                f"The batch is {row.status} already: there is nothing left to cancel.",
                code="batch_not_cancellable",
                param="batch_id",
            )
    row.refresh_from_db()
    return row


def open_batches() -> list[Batch]:
    """Oldest first, whosever they are."""
    return list(Batch.unscoped.filter(ended_at__isnull=True).order_by("id"))


def lines_of(batch: Batch) -> list[BatchLine] | None:
    """The lines to run, or None when the batch has failed for them.

    A file without errors makes it `in_progress`, once.
    """
    file = StoredFile.objects.filter(tenant_id=batch.tenant_id, file_id=batch.input_file_id).first()
    errors: list[dict[str, Any]] = []
    lines: list[BatchLine] = []
    if file is None:
        errors.append(_error(None, "file_not_found", "The input file is gone."))
    else:
        lines = _parse(bytes(file.content), batch.endpoint, errors)
    rows = Batch.objects.filter(tenant_id=batch.tenant_id, pk=batch.pk)
    now = timezone.now()
    if errors:
        told = msgspec.json.encode(errors[:_ERRORS_TOLD])
        rows.filter(status__in=OPEN).update(status=BatchStatus.FAILED, ended_at=now, errors=told)
        return None
    rows.filter(status=BatchStatus.VALIDATING).update(
        status=BatchStatus.IN_PROGRESS, in_progress_at=now, total=len(lines)
    )
    return lines


def _parse(content: bytes, endpoint: str, errors: list[dict[str, Any]]) -> list[BatchLine]:
    lines: list[BatchLine] = []
    seen: set[str] = set()
    models: set[Any] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        if len(lines) == LINES_MAX:
            errors.append(_error(number, "too_many_lines", f"A batch has at most {LINES_MAX} lines."))
            break
        try:
            line = read_json(text, BatchLine)
        except InvalidRequest as error:
            errors.append(_error(number, "invalid_json_line", error.message, error.param))
            continue
        if line.url != endpoint:
            errors.append(_error(number, "mismatched_url", f"'url' must be '{endpoint}'.", "url"))
        if line.custom_id in seen:
            errors.append(_error(number, "duplicate_custom_id", "'custom_id' comes twice.", "custom_id"))
        seen.add(line.custom_id)
        models.add(str(line.body.get("model")))
        lines.append(line)
    if len(models) > 1:
        errors.append(_error(None, "mismatched_model", "All lines of a batch name one model.", "body.model"))
    if not lines and not errors:
        errors.append(_error(None, "empty_file", "The input file has no lines."))
    return lines


def _error(line: int | None, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"line": line, "code": code, "message": message, "param": param}


def ended_lines(batch: Batch) -> set[int]:
    return set(
        BatchResult.objects.filter(tenant_id=batch.tenant_id, batch=batch).values_list("line", flat=True)
    )


def record_line(batch: Batch, number: int, told: dict[str, Any], *, is_error: bool) -> None:
    """Once: who comes second with the same line changes nothing."""
    try:
        with transaction.atomic():
            BatchResult.objects.create(
                tenant_id=batch.tenant_id,
                batch=batch,
                line=number,
                is_error=is_error,
                body=msgspec.json.encode(told),
            )
            count = {"failed": F("failed") + 1} if is_error else {"completed": F("completed") + 1}
            Batch.objects.filter(tenant_id=batch.tenant_id, pk=batch.pk).update(**count)
    except IntegrityError:
        return


def status_of(batch: Batch) -> str:
    return Batch.objects.filter(tenant_id=batch.tenant_id, pk=batch.pk).values_list("status", flat=True).get()


def end_batch(batch: Batch, status: BatchStatus) -> None:
    """Writes the files and closes it, in one transaction: after a crash it is simply done again."""
    with transaction.atomic():
        rows = Batch.objects.filter(tenant_id=batch.tenant_id, pk=batch.pk)
        row = rows.select_for_update().get()
        if row.ended_at is not None:
            return
        now = timezone.now()
        files = {}
        for is_error, name in ((False, "output"), (True, "error")):
            results = BatchResult.objects.filter(tenant_id=batch.tenant_id, batch=batch, is_error=is_error)
            bodies = [bytes(body) for body in results.order_by("line").values_list("body", flat=True)]
            if bodies:
                file = store_file(
                    tenant_id=batch.tenant_id,
                    filename=f"{batch.batch_id}_{name}.jsonl",
                    purpose="batch_output",
                    content=b"\n".join(bodies) + b"\n",
                )
                files[f"{name}_file_id"] = file.file_id
        rows.update(status=status, ended_at=now, finalizing_at=now, **files)
