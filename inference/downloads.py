"""A file of one tenant's as an answer: saved rather than shown, and kept by no cache."""

from __future__ import annotations

from django.http import HttpResponse

from inference.models import ExportFormat, UsageExport

MEDIA_TYPES = {
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.XLSX: "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}


def export_response(export: UsageExport, content: bytes) -> HttpResponse:
    return download(content, export.file_name, MEDIA_TYPES[ExportFormat(export.format)])


def download(content: bytes, file_name: str, content_type: str) -> HttpResponse:
    """`file_name` is ours: plain ASCII without quotes."""
    response = HttpResponse(content, content_type=content_type)
    response.headers["Content-Disposition"] = f'attachment; filename="{file_name}"'
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response
