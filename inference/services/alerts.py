"""Looks for what a tenant should know, and tells it once: in the console and by mail to those who answer for it."""

from __future__ import annotations

import smtplib
from collections.abc import Iterator
from datetime import datetime, timedelta
from statistics import median
from typing import Final

import structlog
from django.conf import settings
from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import F, Sum
from django.utils import timezone

from inference.models import Alert, AlertKind
from inference.rollups import days_of
from inference.services.recall import budget_spent
from tenants.models import ApiKey, Role, Tenant
from tenants.principal_selectors import budgets_of
from tenants.quotas.periods import period_at
from tenants.templatetags.figures import limit_title, units, usd

log = structlog.get_logger(__name__)

_SHARES: Final = (50, 80, 100)
"""Percent of a budget."""
_KEY_DAYS: Final = (1, 7)
_USUAL_DAYS: Final = 14
_UNUSUAL_TIMES: Final = 3
_UNUSUAL_SPREADS: Final = 6
_SPREAD_OF_NORMAL: Final = 1.4826
"""What makes a median deviation comparable with a standard deviation (Rousseeuw and Croux, 1993)."""
_UNUSUAL_LEAST_MICROUSD: Final = 1_000_000
"""Below a dollar a day nothing is unusual."""
_MAILS: Final = 100
_MAILED_WITHIN: Final = timedelta(days=2)
"""An installation that begins to send mail does not begin with what is long over."""
_TOLD: Final = (Role.OWNER, Role.ADMIN, Role.BILLING)


def raise_alerts(now: datetime | None = None) -> int:
    """Writes what is new, for every tenant that is not suspended; any number may run at once. Returns how many."""
    now = now or timezone.now()
    new = 0
    for tenant in (
        Tenant.objects.filter(suspended_at=None).select_related("tier").order_by("id").iterator(200)
    ):
        found = [*_budgets(tenant, now), *_ending_keys(tenant, now), *_unusual_spend(tenant, now)]
        if found:
            before = Alert.objects.for_tenant(tenant).count()
            Alert.objects.bulk_create(found, ignore_conflicts=True)
            new += Alert.objects.for_tenant(tenant).count() - before
    return new


def mail_alerts() -> int:
    """Sends what was not sent yet, oldest first; what the mail server does not take is tried again by the next call,
    for two days. Where no mail is sent at all, nothing counts as mailed.

    Each is locked while it is sent, so that two calls don't both send it. Returns how many were sent.
    """
    if not settings.MAIL_IS_SENT:
        return 0
    sent, since = 0, timezone.now() - _MAILED_WITHIN
    for _ in range(_MAILS):
        with transaction.atomic():
            alert = (
                Alert.unscoped.select_for_update(skip_locked=True, of=("self",))
                .select_related("tenant")
                .filter(mailed_at=None, created_at__gte=since)
                .order_by("id")
                .first()
            )
            if alert is None:
                return sent
            people = alert.tenant.memberships.filter(role__in=_TOLD, user__is_active=True)
            addresses = list(people.values_list("user__email", flat=True))
            try:
                if addresses:
                    EmailMessage(
                        # A name with a line break would be refused by Django, and hold up every tenant's mail.
                        subject=" ".join(f"{alert.tenant.name}: {alert.title}".split()),
                        body=f"{alert.text}\n\n{settings.BASE_URL}/t/{alert.tenant.public_id}/\n",
                        bcc=addresses,
                    ).send()
            except (OSError, smtplib.SMTPException) as error:
                log.warning("alert_not_mailed", alert=str(alert.public_id), error=str(error))
                return sent
            Alert.objects.filter(tenant=alert.tenant, pk=alert.pk).update(mailed_at=timezone.now())
            sent += 1
    return sent


def _budgets(tenant: Tenant, now: datetime) -> Iterator[Alert]:
    for principal, limit in budgets_of(tenant):
        assert limit.calendar is not None
        spent = budget_spent(principal, limit, now)
        period = period_at(limit.calendar, now, tenant.timezone)
        # Of several that were passed at once the furthest says all: three mails of one jump tell no more.
        share = max((share for share in _SHARES if spent * 100 >= limit.amount * share), default=None)
        if share is None:
            continue
        hard = "It is hard: requests are refused when it is spent." if limit.is_hard else ""
        yield Alert(
            tenant=tenant,
            kind=AlertKind.BUDGET,
            subject=f"{limit.scope}:{limit.serial}",
            period=period.name,
            threshold=share,
            title=f"{share} % of a budget is used",
            text=(
                f"{limit_title(limit)} ({limit.scope}), {period.name}: {units(spent, limit)} of "
                f"{units(limit.amount, limit)} is used. {hard}"
            ).strip(),
        )


def _ending_keys(tenant: Tenant, now: datetime) -> Iterator[Alert]:
    soon = now + timedelta(days=max(_KEY_DAYS))
    for key in ApiKey.objects.filter(
        tenant=tenant, revoked_at=None, expires_at__gt=now, expires_at__lte=soon
    ):
        assert key.expires_at is not None
        ends = key.expires_at.astimezone(tenant.zone)
        yield Alert(
            tenant=tenant,
            kind=AlertKind.KEY_EXPIRY,
            subject=str(key.public_id),
            period=f"{ends:%Y-%m-%d}",
            threshold=min(days for days in _KEY_DAYS if key.expires_at <= now + timedelta(days=days)),
            title=f"The key “{key.name}” ends soon",
            text=f"“{key.name}” ({key.prefix}…) ends on {ends:%Y-%m-%d at %H:%M} {tenant.timezone}.",
        )


def _unusual_spend(tenant: Tenant, now: datetime) -> Iterator[Alert]:
    today = now.astimezone(tenant.zone).date()
    lately = days_of(tenant.pk).filter(day__gte=today - timedelta(days=_USUAL_DAYS), day__lte=today)
    days = lately.values_list("day")
    spent = {day: int(cost) for day, cost in days.annotate(cost=Sum(F("cost_microusd"))).order_by()}
    before = [spent.get(today - timedelta(days=back), 0) for back in range(1, _USUAL_DAYS + 1)]
    # A tenant that has just begun has no habits yet.
    if sum(day < today for day in spent) < _USUAL_DAYS // 2:
        return
    # Medians: one wild day, or a few free ones, neither raises nor lowers what counts as usual.
    usual = round(median(before))
    spread = _SPREAD_OF_NORMAL * median(abs(cost - usual) for cost in before)
    unusual = max(usual * _UNUSUAL_TIMES, round(usual + _UNUSUAL_SPREADS * spread), _UNUSUAL_LEAST_MICROUSD)
    if spent.get(today, 0) > unusual:
        yield Alert(
            tenant=tenant,
            kind=AlertKind.UNUSUAL_SPEND,
            subject="cost",
            period=f"{today:%Y-%m-%d}",
            threshold=_UNUSUAL_TIMES * 100,
            title="Today costs more than usual",
            text=f"{usd(spent[today])} so far today; of the {_USUAL_DAYS} days before, half cost {usd(usual)} or less.",
        )
