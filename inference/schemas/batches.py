"""`/v1/files` and `/v1/batches`: what comes in and what goes out."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from inference.models import Batch, BatchStatus, StoredFile
from inference.schemas.sampling import Metadata


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class FileUpload(msgspec.Struct, kw_only=True):
    """The fields of the form."""

    file: bytes
    purpose: Literal["batch"]
    expires_after_seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | None = msgspec.field(
        default=None, name="expires_after[seconds]"
    )


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


class Page(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FilePage(Page, kw_only=True):
    data: list[FileObject]


class Counts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str]


class BatchPage(Page, kw_only=True):
    data: list[BatchObject]


def file_object(row: StoredFile) -> FileObject:
    return FileObject(
        id=row.file_id,
        bytes=row.num_bytes,
        created_at=int(row.created_at.timestamp()),
        expires_at=_unix(row.expires_at),
        filename=row.filename,
        purpose=row.purpose,
    )


def batch_object(row: Batch) -> BatchObject:
    errors = msgspec.json.decode(bytes(row.errors))

    def at(status: BatchStatus) -> int | None:
        return _unix(row.ended_at) if row.status == status else None

    return BatchObject(
        id=row.batch_id,
        endpoint=row.endpoint,
        errors={"object": "list", "data": errors} if errors else None,
        input_file_id=row.input_file_id,
        status=row.status,
        output_file_id=row.output_file_id or None,
        error_file_id=row.error_file_id or None,
        created_at=int(row.created_at.timestamp()),
        in_progress_at=_unix(row.in_progress_at),
        expires_at=int(row.expires_at.timestamp()),
        finalizing_at=_unix(row.finalizing_at),
        completed_at=at(BatchStatus.COMPLETED),
        failed_at=at(BatchStatus.FAILED),
        expired_at=at(BatchStatus.EXPIRED),
        cancelling_at=_unix(row.cancelling_at),
        cancelled_at=at(BatchStatus.CANCELLED),
        request_counts=Counts(row.total, row.completed, row.failed),
        metadata=msgspec.json.decode(bytes(row.metadata)),
    )


def _unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
