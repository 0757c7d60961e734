"""What stands above every page: maintenance, and what the operator announces."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

from inference.models import Announcement, Maintenance


@dataclass(frozen=True, slots=True)
class Notice:
    text: str
    is_warning: bool


def site_notices(request: HttpRequest) -> dict[str, object]:
    """A context processor. Two queries, of pages that show it alone."""
    return {"site_notices": SimpleLazyObject(current_notices)}


def current_notices() -> list[Notice]:
    now = timezone.now()
    found = []
    maintenance = Maintenance.objects.filter(is_on=True).first()
    if maintenance is not None:
        found.append(Notice(f"{maintenance.message} New requests are refused until it is over.", True))
    is_shown = (Q(begins_at=None) | Q(begins_at__lte=now)) & (Q(ends_at=None) | Q(ends_at__gt=now))
    found += [Notice(row.text, row.is_warning) for row in Announcement.objects.filter(is_shown)[:5]]
    return found
