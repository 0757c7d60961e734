"""Alerts: once per threshold and period, to those who answer for the tenant, and again when the mail failed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.core import mail
from django.core.mail.backends.locmem import EmailBackend
from django.urls import reverse
from django.utils import timezone

from inference.models import Alert
from inference.services.alerts import mail_alerts, raise_alerts
from inference.services.ledger import record_usage
from inference.tasks import alert as alert_task
from tenants.models import ModelPrice, Role
from tenants.principal import Calendar, LimitMetric
from tenants.services import add_member, suspend_tenant
from tests.factories import TEST, make_key, make_tenant, make_user, set_limit, signed_in
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


class Refusing(EmailBackend):
    def send_messages(self, messages):
        raise OSError("the mail server is away")


@pytest.fixture(autouse=True)
def _mail_is_sent(settings) -> None:
    settings.MAIL_IS_SENT = True


@pytest.fixture
def tenant():
    return make_tenant("Acme", owner=make_user("owner@example.org"))


def use(tenant, tokens: int, at: datetime = NOW, model: str = "tiny") -> None:
    at_ms = int(at.timestamp() * 1000)
    record_usage(
        [
            an_event(
                str(tenant.public_id),
                model=model,
                prompt_tokens=tokens,
                completion_tokens=0,
                created_at_ms=at_ms,
                finished_at_ms=at_ms,
            )
        ]
    )


def told(tenant) -> list[tuple[str, str, int]]:
    return sorted(Alert.objects.for_tenant(tenant).values_list("kind", "period", "threshold"))


def test_a_budget_is_told_of_at_each_share_once(tenant):
    """FAULTS 74: crossed a hundred times, told once."""
    set_limit(tenant, LimitMetric.TOKENS, 1000, calendar=Calendar.MONTH)
    use(tenant, 499)
    assert raise_alerts(NOW) == 0
    use(tenant, 1)
    assert raise_alerts(NOW) == 1
    for _ in range(100):
        assert raise_alerts(NOW) == 0
    use(tenant, 600)
    for new in (1, 0):
        assert raise_alerts(NOW) == new
    assert told(tenant) == [("budget", "2026-11", share) for share in (50, 100)], "a jump is told of once"
    use(tenant, 500, NOW + timedelta(days=5))
    assert raise_alerts(NOW + timedelta(days=5)) == 1
    assert ("budget", "2026-12", 50) in told(tenant)


def test_who_answers_for_the_tenant_is_mailed_and_nobody_else(tenant):
    for role in Role:
        add_member(actor=TEST, tenant=tenant, user=make_user(f"{role}2@example.org"), role=role)
    make_tenant("Other", owner=make_user("other@example.org"))
    set_limit(tenant, LimitMetric.TOKENS, 100, calendar=Calendar.DAY, is_hard=False)
    use(tenant, 60, timezone.now())
    alert_task()
    alert_task()
    (message,) = mail.outbox
    assert sorted(message.bcc) == [
        "admin2@example.org",
        "billing2@example.org",
        "owner2@example.org",
        "owner@example.org",
    ]
    assert message.to == []
    assert message.subject == "Acme: 50 % of a budget is used"
    assert "Tokens per day" in message.body
    assert "60 of 100" in message.body


def test_what_the_mail_server_refused_is_sent_later(tenant, settings):
    set_limit(tenant, LimitMetric.TOKENS, 100, calendar=Calendar.DAY)
    use(tenant, 60)
    raise_alerts(NOW)
    settings.EMAIL_BACKEND = f"{__name__}.Refusing"
    assert mail_alerts() == 0
    assert Alert.objects.for_tenant(tenant).get().mailed_at is None
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    assert mail_alerts() == 1
    assert mail_alerts() == 0
    assert len(mail.outbox) == 1


def test_where_no_mail_is_sent_nothing_counts_as_mailed(tenant, settings):
    """It did; and who then set up mail must not get what is long over."""
    settings.MAIL_IS_SENT = False
    set_limit(tenant, LimitMetric.TOKENS, 100, calendar=Calendar.DAY)
    use(tenant, 60)
    raise_alerts(NOW)
    assert mail_alerts() == 0
    alert = Alert.objects.for_tenant(tenant).get()
    assert alert.mailed_at is None
    owner = tenant.memberships.get().user
    page = signed_in(owner).get(reverse("alerts", args=[tenant.public_id])).content.decode()
    assert "50 % of a budget" in page
    assert "Mailed" not in page
    settings.MAIL_IS_SENT = True
    Alert.objects.filter(tenant=tenant).update(created_at=timezone.now() - timedelta(days=3))
    assert mail_alerts() == 0
    Alert.objects.filter(tenant=tenant).update(created_at=timezone.now() - timedelta(days=1))
    assert mail_alerts() == 1
    assert "Mailed" in signed_in(owner).get(reverse("alerts", args=[tenant.public_id])).content.decode()


def test_a_key_that_ends_is_told_of_a_week_and_a_day_before(tenant):
    end = timezone.now() + timedelta(days=30)
    make_key(tenant, name="bot", expires_at=end)
    for before, count in [(8, 0), (6, 1), (5, 1), (0.5, 2), (-1, 2)]:
        raise_alerts(end - timedelta(days=before))
        assert len(told(tenant)) == count
    assert [threshold for _, _, threshold in told(tenant)] == [1, 7]
    make_key(tenant, name="short", expires_at=timezone.now() + timedelta(hours=2))
    for new in (1, 0):
        assert raise_alerts() == new


def test_a_day_unlike_the_others_is_told_of(tenant):
    ModelPrice.objects.create(
        model="dear",
        valid_from=NOW - timedelta(days=60),
        input_microusd_per_mtok=1_000_000,
        cached_input_microusd_per_mtok=0,
        output_microusd_per_mtok=0,
    )
    for days in range(1, 15):
        use(tenant, 1_000_000, NOW - timedelta(days=days), "dear")
    use(tenant, 3_000_000, NOW, "dear")
    assert raise_alerts(NOW) == 0
    use(tenant, 1, NOW, "dear")
    assert raise_alerts(NOW) == 1
    assert told(tenant) == [("unusual_spend", "2026-11-29", 300)]
    newcomer = make_tenant()
    use(newcomer, 9_000_000, NOW, "dear")
    raise_alerts(NOW)
    assert told(newcomer) == []


def test_a_suspended_tenant_is_left_alone(tenant):
    set_limit(tenant, LimitMetric.TOKENS, 10, calendar=Calendar.DAY)
    use(tenant, 60)
    suspend_tenant(actor=TEST, tenant=tenant)
    assert raise_alerts(NOW) == 0


def test_the_console_shows_the_tenants_own_and_nobody_elses(tenant, client):
    set_limit(tenant, LimitMetric.TOKENS, 100, calendar=Calendar.DAY)
    use(tenant, 60, timezone.now())
    raise_alerts()
    other = make_tenant("Other", owner=(stranger := make_user()))
    for person, where, shown in ((tenant.memberships.get().user, tenant, True), (stranger, other, False)):
        client.force_login(person)
        page = client.get(f"/t/{where.public_id}/").content.decode()
        assert ("50 % of a budget is used" in page) is shown
