"""Statements: the ledger's sum to the micro-unit; and the console's way to the exports."""

from __future__ import annotations

import io
import random
import re
from datetime import UTC, date, datetime, timedelta

import pytest
from django.urls import reverse
from django.utils import timezone
from pypdf import PdfReader

from inference.models import UsageRecord
from inference.services.exports import write_exports
from inference.services.ledger import adjust_usage, record_usage
from inference.statements import statement_of
from tenants.models import ModelPrice, Tenant
from tenants.services import create_project
from tests.factories import TEST, make_key, make_tenant, make_user, signed_in
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db(transaction=True)
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def owner():
    return make_user("owner@example.org")


@pytest.fixture
def tenant(owner):
    ModelPrice.objects.create(
        model="a",
        valid_from=START,
        input_microusd_per_mtok=150_001,
        cached_input_microusd_per_mtok=75_000,
        output_microusd_per_mtok=600_003,
    )
    tenant = make_tenant("Acme", owner=owner)
    tenant.timezone = "Pacific/Auckland"
    tenant.save()
    dice = random.Random(11)
    for whose in (tenant, make_tenant("Other")):
        record_usage(
            [
                an_event(
                    str(whose.public_id),
                    model=dice.choice(["a", "b"]),
                    prompt_tokens=dice.randrange(1, 5000),
                    completion_tokens=dice.randrange(500),
                    created_at_ms=(
                        at := int(
                            (START + timedelta(minutes=dice.randrange(60 * 24 * 90))).timestamp() * 1000
                        )
                    ),
                    finished_at_ms=at + 10,
                )
                for _ in range(200)
            ]
        )
    return tenant


def test_the_months_add_up_to_the_ledger(tenant):
    """FAULTS 64: in days of the tenant's zone, so that no request falls between two statements."""
    records = list(UsageRecord.objects.for_tenant(tenant))
    total = 0
    for month in (1, 2, 3, 4):
        statement = statement_of(tenant, date(2026, month, 17))
        of_month = [record for record in records if record.day.month == month]
        assert statement.total_microusd == sum(record.cost_microusd for record in of_month)
        assert sum(line.requests for line in statement.lines) == len(of_month)
        assert sum(line.prompt_tokens for line in statement.lines) == sum(r.prompt_tokens for r in of_month)
        total += statement.total_microusd
    assert total == sum(record.cost_microusd for record in records) > 0


def test_what_the_page_shows_adds_up(tenant, owner):
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-1_234_567, reason="Sorry <b>")
    month = UsageRecord.objects.for_tenant(tenant).order_by("day").last().day
    url = reverse("statement", args=[tenant.public_id])
    page = signed_in(owner).get(url, {"month": f"{month:%Y-%m}"}).content.decode()
    shown = [cell.replace("$", "").replace(",", "") for cell in re.findall(r'num"[^>]*>(-?\$[\d,.]+)<', page)]
    amounts = [round(float(cell) * 1e6) for cell in shown]
    *lines, usage, adjustments, total = amounts
    assert sum(lines) == usage + adjustments == total == statement_of(tenant, month).total_microusd
    today = signed_in(owner).get(url).content.decode()
    assert "Sorry &lt;b&gt;" in today
    assert "-$1.234567" in today
    began = timezone.now().date().replace(day=1) - timedelta(days=1)
    Tenant.objects.filter(pk=tenant.pk).update(created_at=datetime(began.year, began.month, 3, tzinfo=UTC))
    months = re.findall(r'href="\?month=([\d-]+)"', signed_in(owner).get(url).content.decode())
    assert months == [f"{timezone.now():%Y-%m}", f"{began:%Y-%m}"], "before it there was no tenant"
    for bad in ("2026-13", "x", "0001-01", "9999-12"):
        assert signed_in(owner).get(url, {"month": bad}).status_code == 404


def test_the_pdf_says_what_the_page_says(tenant, owner):
    """FAULTS 64: every amount, in order; hostile names are text; long tables go on over pages."""
    project = create_project(actor=TEST, tenant=tenant, name='#panic("x") *Жук* <b>')
    key = make_key(tenant, project=project).api_key
    at = int((START + timedelta(days=70)).timestamp() * 1000)
    record_usage(
        [
            an_event(
                str(tenant.public_id), model=f"a-rather-long-model-name-{n}", key_id=str(key.public_id),
                created_at_ms=at, finished_at_ms=at,
            )
            for n in range(80)
        ]
    )  # fmt: skip
    month = UsageRecord.objects.for_tenant(tenant).order_by("day").last().day
    url, query = reverse("statement", args=[tenant.public_id]), {"month": f"{month:%Y-%m}"}
    page = signed_in(owner).get(url, query).content.decode()
    answer = signed_in(owner).get(reverse("statement_file", args=[tenant.public_id]), query)
    assert answer.headers["Content-Type"] == "application/pdf"
    assert f"statement-acme-{month:%Y-%m}.pdf" in answer.headers["Content-Disposition"]
    pages = PdfReader(io.BytesIO(answer.content)).pages
    text = "\n".join(page.extract_text() for page in pages)
    assert len(pages) > 1
    assert all("Tokens in" in page.extract_text() for page in pages[:-1])
    shown = re.findall(r'num"[^>]*>(-?\$[\d,.]+)<', page)
    assert len(shown) > 80
    assert re.findall(r"-?\$[\d,]+\.\d{6}", text) == shown
    assert '#panic("x") *Жук* <b>' in text.replace("\n", " ")
    assert (
        signed_in(owner).get(reverse("statement_file", args=[tenant.public_id]), {"month": "x"}).status_code
        == 404
    )


def test_a_member_asks_for_a_file_and_fetches_it(tenant, owner):
    client, url = signed_in(owner), reverse("exports", args=[tenant.public_id])
    assert (
        "Choose a format" in client.post(url, {"format": "exe", "days": "30"}, follow=True).content.decode()
    )
    assert "being written" in client.post(url, {"format": "csv", "days": "365"}, follow=True).content.decode()
    assert write_exports() == 1
    (path,) = re.findall(r'href="(/t/[^"]*/exports/[^"]+/)"', client.get(url).content.decode())
    file = client.get(path)
    assert file.headers["Content-Disposition"].startswith("attachment")
    assert file.headers["Cache-Control"] == "no-store"
    assert signed_in(make_user()).get(path).status_code == 404
