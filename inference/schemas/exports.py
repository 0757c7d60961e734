"""Requests and answers of `/v1/usage/exports`."""

from __future__ import annotations

from typing import Literal

import msgspec

from inference.models import UsageExport


class NewExport(msgspec.Struct):
    format: Literal["csv", "xlsx"] = "csv"
    start: str | int | None = None
    end: str | int | None = None
    bucket_width: str = "1d"
    group_by: list[str] = []
    project: list[str] = []
    key: list[str] = []
    model: list[str] = []
    tier: list[str] = []
    finish_reason: list[str] = []


class ExportObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "usage.export"
    format: str
    state: str
    error: str | None
    file_name: str
    rows: int
    total_microusd: int
    requested_by: str
    created_at: int
    finished_at: int | None
    expires_at: int
    """Unix seconds, as all of them."""


class ExportList(msgspec.Struct):
    data: list[ExportObject]
    has_more: bool = False
    object: str = "list"


def export_object(export: UsageExport) -> ExportObject:
    return ExportObject(
        id=str(export.public_id),
        format=export.format,
        state=export.state,
        error=export.error or None,
        file_name=export.file_name,
        rows=export.rows,
        total_microusd=export.total_microusd,
        requested_by=export.requested_by,
        created_at=int(export.created_at.timestamp()),
        finished_at=None if export.finished_at is None else int(export.finished_at.timestamp()),
        expires_at=int(export.expires_at.timestamp()),
    )
