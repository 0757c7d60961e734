"""Text that tenants, models and operators choose, wherever it is shown: never markup, formula or mail header."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from django.core import mail
from django.test import Client
from django.utils import timezone

from inference.models import (
    Alert,
    AlertKind,
    Announcement,
    Batch,
    Maintenance,
    ModelSetting,
    ParkedUsageEvent,
    UsageRecord,
)
from inference.services.alerts import mail_alerts
from inference.services.ledger import adjust_usage
from inference.services.partitions import ensure_partitions
from inference.services.webhooks import create_webhook
from inference.statement_pdf import statement_pdf
from inference.statements import statement_of
from tenants.models import Invitation, Membership, Project, Role, Tenant
from tenants.services import Actor, add_member, create_project, record_audit, suspend_tenant
from tenants.services.invitations import invite_member, mail_invitations
from tenants.services.service_accounts import create_service_account
from tests.factories import Cast, make_key, make_user
from tests.pages import OPERATOR, OWNER, PAGES, admin_lists, path_of

EVIL = """</title></textarea></script><script>alert(1)</script>"'><img src=x onerror=alert(2)>{{7*7}}"""
FORMULA = "=cmd|'/C calc'!A0" + EVIL
pytestmark = pytest.mark.django_db


class Seen(HTMLParser):
    """What a browser would make of a page that it must not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "img" and named.get("src") == "x":
            self.found.append(f"<img> at {self.getpos()}")
        if any(name.startswith("onerror") for name in named):
            self.found.append(f"{tag} with a handler at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and "alert(1)" in data and "\\u003C" not in data:
            self.found.append(f"a script at {self.getpos()}")


@pytest.fixture
def ids(cast: Cast) -> dict[str, Any]:
    tenant = cast.tenant
    Tenant.objects.filter(pk=tenant.pk).update(name=f"T{EVIL}"[:120])
    tenant.refresh_from_db()
    actor = Actor.person(cast.owner)
    project = create_project(actor=actor, tenant=tenant, name=f"P{EVIL}")
    key = make_key(tenant, name=FORMULA, project=project, allowed_models=[f"M{EVIL}"]).api_key
    create_service_account(actor=actor, tenant=tenant, name=f"S{EVIL}")
    hook = create_webhook(
        actor=actor, tenant=tenant, url="https://hooks.example.org/%22%3E<script>alert(1)</script>"
    )
    person = make_user('"\'><img/src=x>"@example.org')
    add_member(actor=actor, tenant=tenant, user=person, role=Role.DEVELOPER)
    invite_member(actor=actor, by=Role.OWNER, tenant=tenant, email="guest@example.org", role=Role.VIEWER)
    Alert.objects.create(
        tenant=tenant, kind=AlertKind.BUDGET, subject="x", period="2026-11", threshold=50,
        title=f"A\nBcc: evil@example.org\n{EVIL}", text=EVIL,
    )  # fmt: skip
    now = timezone.now()
    ensure_partitions([now.date()])
    UsageRecord.objects.create(
        tenant=tenant, request_id="evil", key_public_id=key.public_id, project_public_id=project.public_id,
        model=FORMULA, tier="standard", endpoint=EVIL[:64], finish_reason="error", error_code=EVIL[:64],
        prompt_tokens=1, completion_tokens=1, cost_microusd=5, worker_id=EVIL, created_at=now - timedelta(seconds=2),
        day=now.date(), finished_at=now, decision='{"text": "</script><script>alert(1)</script>"}',
    )  # fmt: skip
    adjust_usage(actor=actor, tenant=tenant, cost_microusd=-1, reason=FORMULA)
    Batch.objects.create(
        tenant=tenant, batch_id="batch_evil", input_file_id="file-x", endpoint=EVIL[:64], expires_at=now
    )
    Announcement.objects.create(text=EVIL)
    ModelSetting.objects.create(name=f"N{EVIL}", target=f"O{EVIL}")
    ParkedUsageEvent.objects.create(fingerprint="f", request_id=EVIL, reason=EVIL, event={"model": EVIL})
    record_audit(
        actor=actor,
        action="project.renamed",
        tenant=tenant,
        target=project,
        before={"name": EVIL},
        after={"name": FORMULA},
    )
    return {
        "tenant_id": tenant.public_id,
        "key_id": key.public_id,
        "project_id": project.public_id,
        "webhook_id": hook.public_id,
        "member_id": Membership.objects.for_tenant(tenant).get(user=person).public_id,
        "request_id": "evil",
    }


def pages(cast: Cast, ids: dict[str, Any]) -> Iterator[tuple[str, str]]:
    owner, operator = Client(), Client()
    owner.force_login(cast.owner)
    operator.force_login(cast.operator)
    asked = [
        (owner if PAGES[name] == OWNER else operator, path_of(name, ids))
        for name in PAGES
        if PAGES[name] in (OWNER, OPERATOR)
    ]
    project = Project.objects.for_tenant(cast.tenant).get()
    asked += [(operator, path) for path in admin_lists()]
    asked += [
        (operator, f"/admin/tenants/tenant/{cast.tenant.pk}/change/"),
        (operator, f"/admin/tenants/project/{project.pk}/change/"),
        (operator, f"/admin/inference/usagerecord/{UsageRecord.objects.get(tenant=cast.tenant).pk}/change/"),
        (owner, "/"),
    ]
    for client, path in asked:
        answer = client.get(path, follow=True)
        assert answer.status_code == 200, path
        yield path, answer.content.decode()


def test_no_page_takes_it_for_markup(cast: Cast, ids: dict[str, Any]):
    shown = 0
    for path, html in pages(cast, ids):
        seen = Seen()
        seen.feed(html)
        assert not seen.found, f"{path}: {seen.found}"
        assert "<script>alert(1)" not in html, path
        shown += "&lt;script&gt;alert(1)" in html
    assert shown > 25, "the text is on most pages, or this proves nothing"


def test_nor_does_a_page_about_a_stop(cast: Cast, ids: dict[str, Any]):
    suspend_tenant(actor=Actor.system("tests"), tenant=cast.tenant, reason=EVIL)
    Maintenance.objects.update_or_create(pk=1, defaults={"is_on": True, "message": EVIL[:200]})
    browser = Client()
    browser.force_login(cast.owner)
    html = browser.get(path_of("overview", ids)).content.decode()
    seen = Seen()
    seen.feed(html)
    assert not seen.found
    assert html.count("&lt;script&gt;alert(1)") >= 2


def test_no_cell_of_a_file_is_a_formula(cast: Cast, ids: dict[str, Any]):
    browser = Client()
    browser.force_login(cast.owner)
    files = 0
    for path in (f"{path_of('usage_csv', ids)}?days=90", f"{path_of('audit', ids)}?form=csv"):
        content = browser.get(path).content.decode("utf-8-sig")
        cells = [cell for row in csv.reader(io.StringIO(content, newline="")) for cell in row]
        assert any(cell.startswith("'=cmd|") or "=cmd|" in cell for cell in cells), path
        assert not [cell for cell in cells if cell.startswith(("=", "@", "+"))], path
        files += 1
    assert files == 2


def test_a_statement_is_set_as_text(cast: Cast):
    name = '#read("/etc/passwd") *bold* $x$ <label> ]]'
    Tenant.objects.filter(pk=cast.tenant.pk).update(name=name)
    cast.tenant.refresh_from_db()
    adjust_usage(actor=Actor.system("tests"), tenant=cast.tenant, cost_microusd=7, reason=f"#panic() {name}")
    pdf = statement_pdf(cast.tenant, statement_of(cast.tenant, timezone.now().date()))
    assert pdf.startswith(b"%PDF-")


@pytest.mark.usefixtures("ids")
def test_no_mail_takes_it_for_a_header(cast: Cast, settings: Any):
    settings.MAIL_IS_SENT = True
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    Invitation.unscoped.exclude(tenant=cast.tenant).delete()  # of files before this one
    assert mail_alerts() == 1
    assert mail_invitations() == 1
    for message in mail.outbox:
        sent = message.message()
        assert "evil@example.org" not in (sent["To"] or "") + (sent["Bcc"] or "")
        assert "\n" not in str(message.subject)
        assert sent.get_content_type() == "text/plain"
