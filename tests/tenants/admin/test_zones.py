"""The operator's admin shows and reads times in the zone of who looks at it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.utils import timezone

from inference.models import Announcement
from tests.tenants.admin.forms import url

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)


@pytest.fixture
def row():
    return Announcement.objects.create(text="An update", begins_at=NOON)


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("Europe/Berlin", "2026-07-01 14:00 CEST"),
        ("America/Argentina/Buenos_Aires", "2026-07-01 09:00 -03"),
        ("", "2026-07-01 12:00 UTC"),
        ("Europe", "2026-07-01 12:00 UTC"),
        ("Mars/Olympus_Mons", "2026-07-01 12:00 UTC"),
        ("../../../etc/passwd", "2026-07-01 12:00 UTC"),
        ("x" * 5000, "2026-07-01 12:00 UTC"),
    ],
)
def test_a_list_is_in_the_viewers_zone_and_says_which_it_is(browser, row, zone, shown):
    browser.cookies["weir_zone"] = zone
    assert shown in browser.get(url(Announcement, "changelist")).content.decode()
    assert timezone.get_current_timezone_name() == "UTC"  # the next request's is another viewer's


def test_what_is_typed_is_meant_in_that_zone(browser, row):
    browser.cookies["weir_zone"] = "Asia/Tokyo"
    page = browser.get(url(Announcement, "change", row.pk)).content.decode()
    assert 'value="21:00:00"' in page
    form = {"text": "An update", "begins_at_0": "2026-07-01", "begins_at_1": "22:30"}
    assert browser.post(url(Announcement, "change", row.pk), form).status_code == 302
    row.refresh_from_db()
    assert row.begins_at == datetime(2026, 7, 1, 13, 30, tzinfo=UTC)


def test_only_the_admin_is(client, row):
    client.cookies["weir_zone"] = "Asia/Tokyo"
    assert b"weir_zone" not in client.get("/docs/").content
    assert timezone.get_current_timezone_name() == "UTC"
