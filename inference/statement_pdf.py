"""A statement as a PDF: the same rows and sums as its page, set by Typst (docs/adr/0025)."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec
import typst
from django.conf import settings
from django.template.loader import get_template
from django.utils import timezone

from inference.statements import Statement
from tenants.models import Tenant
from tenants.templatetags.figures import count, usd_exact

_TEMPLATE: Final = "inference/statement.typ"


def statement_pdf(tenant: Tenant, statement: Statement, now: datetime | None = None) -> bytes:
    """Pages of A4, tagged, with their fonts."""
    values = {
        "issuer": str(settings.BASE_URL),
        "title": f"Statement of {statement.first_day:%B %Y}",
        "tenant": tenant.name,
        "span": f"{statement.first_day} to {statement.last_day}, days of {tenant.timezone}",
        "note": "The month is not over: amounts will grow." if _is_open(tenant, statement, now) else "",
        "lines": [
            [
                line.project or "\N{EN DASH}",
                line.model,
                count(line.requests),
                count(line.prompt_tokens),
                count(line.cached_tokens),
                count(line.completion_tokens),
                usd_exact(line.cost_microusd),
            ]
            for line in statement.lines
        ],
        "adjustments": [
            [f"Adjustment of {row.day}: {row.reason}", usd_exact(row.cost_microusd)]
            for row in statement.adjustments
        ],
        "usage": usd_exact(statement.usage_microusd),
        "adjusted": usd_exact(statement.adjustment_microusd),
        "total": usd_exact(statement.total_microusd),
        "foot": "US dollars, to the millionth. Each request was priced when it was accepted; corrections are "
        "adjustments of the day on which they were made.",
    }
    source = get_template(_TEMPLATE).template.source.encode()  # type: ignore[attr-defined]
    return typst.compile(source, format="pdf", sys_inputs={"data": msgspec.json.encode(values).decode()})


def _is_open(tenant: Tenant, statement: Statement, now: datetime | None) -> bool:
    return (now or timezone.now()).astimezone(tenant.zone).date() <= statement.last_day
