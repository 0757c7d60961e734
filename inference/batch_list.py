"""A tenant's batches, as the console lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from inference.models import Batch
from inference.models.batch import OPEN
from inference.services.files import live_files
from tenants.console import Console
from tenants.selectors import api_key_names

PAGE: Final = 30


@dataclass(frozen=True, slots=True)
class BatchLineOfPage:
    batch: Batch
    key: str
    """The name of the key whose limits hold."""
    is_open: bool
    reason: str
    """Why it failed, in the words of the first error; "": it did not."""
    files: list[tuple[str, str]]
    """What can still be fetched: (what, file id)."""

    @property
    def ended_lines(self) -> int:
        return self.batch.completed + self.batch.failed


def batches_context(console: Console, *, before: str = "") -> dict[str, Any]:
    """Of the page and of its live part. Three queries."""
    rows = Batch.objects.filter(tenant=console.tenant)
    last = rows.filter(batch_id=before).values_list("id", flat=True).first() if before else None
    if last is not None:
        rows = rows.filter(id__lt=last)
    found = list(rows.order_by("-id")[: PAGE + 1])
    shown = found[:PAGE]
    names = api_key_names(console.tenant, {row.key_public_id for row in shown if row.key_public_id})
    asked = {file_id for row in shown for file_id in (row.output_file_id, row.error_file_id) if file_id}
    there = set(live_files(console.tenant.pk).filter(file_id__in=asked).values_list("file_id", flat=True))
    return {
        "console": console,
        "batches": [
            BatchLineOfPage(
                batch=row,
                key=names.get(row.key_public_id, "") if row.key_public_id else "",
                is_open=row.status in OPEN,
                reason=_reason(row),
                files=[
                    (what, file_id)
                    for what, file_id in (("answers", row.output_file_id), ("errors", row.error_file_id))
                    if file_id in there
                ],
            )
            for row in shown
        ],
        "before": before if last is not None else "",
        "older": shown[-1].batch_id if len(found) > len(shown) else "",
    }


def _reason(batch: Batch) -> str:
    errors = msgspec.json.decode(bytes(batch.errors))
    if not errors:
        return ""
    first = errors[0]
    line = f"Line {first['line']}: " if first.get("line") else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{line}{first['message']}{more}"
