"""Deleting a tenant: announced, undone for a while, then done.

What accounts need stays: the ledger, its adjustments and roll-ups, and the audit log, with no one's name, address or
words in them. Everything else goes, and so do the accounts of those who belonged to it alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, cast

import structlog
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.db import connection, transaction
from django.db.models import CASCADE
from django.utils import timezone

from tenants.models import Membership, Tenant, User
from tenants.scope import TenantScopedManager
from tenants.services.audit import Actor, record_audit

log = structlog.get_logger(__name__)

REASON: Final = "It is to be deleted."

_ERASE_AUDIT: Final = """
UPDATE tenants_auditentry
SET actor_label = CASE WHEN actor_user_id IS NULL THEN actor_label ELSE '(erased)' END,
    ip_address = NULL, target_label = '', before = NULL, after = NULL
WHERE tenant_id = %(tenant)s OR (actor_user_id = ANY(%(users)s) AND tenant_id IS NULL)
"""


@transaction.atomic
def schedule_deletion(*, actor: Actor, tenant: Tenant) -> bool:
    """Suspends the tenant now, and deletes it when the days of grace are over. False when that was said before.

    Keys are refused and running answers stop within a second, as with every suspension.
    """
    now = timezone.now()
    delete_at = now + timedelta(days=settings.DELETION_GRACE_DAYS)
    current = Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
    if current.delete_at is None:
        current.delete_at = delete_at
        if current.suspended_at is None:
            current.suspended_at, current.suspended_reason = now, REASON
        current.save(update_fields=["delete_at", "suspended_at", "suspended_reason", "updated_at"])
        record_audit(
            actor=actor,
            action="tenant.deletion_scheduled",
            tenant=current,
            target=current,
            after={"delete_at": delete_at},
        )
        changed = True
    else:
        changed = False
    tenant.refresh_from_db()
    return changed


@transaction.atomic
def restore_tenant(*, actor: Actor, tenant: Tenant) -> bool:
    """Takes the deletion back; a suspension that was there before it stays. False when none was under way."""
    current = Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
    if current.delete_at is None or current.purged_at is not None:
        return False
    before = current.delete_at
    current.delete_at = None
    if current.suspended_reason == REASON:
        current.suspended_at, current.suspended_reason = None, ""
    current.save(update_fields=["delete_at", "suspended_at", "suspended_reason", "updated_at"])
    record_audit(
        actor=actor,
        action="tenant.restored",
        tenant=current,
        target=current,
        before={"delete_at": before},
    )
    tenant.refresh_from_db()
    return True


def purge_due_tenants() -> int:
    """Deletes every tenant whose grace is over; run again after a crash it goes on. Says how many were finished."""
    done = 0
    for tenant in Tenant.objects.filter(delete_at__lte=timezone.now(), purged_at=None).order_by("delete_at"):
        done += _purge(tenant)
    return done


def _purge(tenant: Tenant) -> bool:
    with transaction.atomic():
        # Held to the end: a restoration that came a moment too late finds it purged.
        current = Tenant.objects.select_for_update().get(pk=tenant.pk)
        if current.purged_at is not None or current.delete_at is None or current.delete_at > timezone.now():
            return False
        people = _people_of_it_alone(current)
        SocialApp.objects.filter(sign_on__tenant=current).delete()
        for model in _owned_models():
            cast(TenantScopedManager[Any], model.objects).for_tenant(current).delete()
        _erase_audit(current, people)
        for user in people:
            _erase_account(user)
        current.name = "Deleted tenant"
        current.slug = f"deleted-{current.public_id.hex}"[:63]
        current.suspended_reason = "Deleted."
        current.purged_at = timezone.now()
        current.save(update_fields=["name", "slug", "suspended_reason", "purged_at", "updated_at"])
        record_audit(
            actor=Actor.system("purge"), action="tenant.deleted", tenant=current, target=current,
            after={"accounts_erased": len(people)},
        )  # fmt: skip
    log.info("tenant_purged", tenant=str(tenant.public_id), accounts_erased=len(people))
    return True


def _owned_models() -> list[type[Any]]:
    """Every model whose rows go with their tenant, of whichever app. What accounts need refuses (PROTECT)."""
    return [
        relation.related_model
        for relation in Tenant._meta.related_objects
        if getattr(relation, "on_delete", None) is CASCADE
    ]


def _people_of_it_alone(tenant: Tenant) -> list[User]:
    members = User.objects.filter(memberships__tenant=tenant, is_staff=False)
    elsewhere = Membership.unscoped.exclude(tenant=tenant).values("user")
    return list(members.exclude(pk__in=elsewhere).select_for_update(of=("self",)))


def _erase_account(user: User) -> None:
    for model in (EmailAddress, Authenticator, SocialAccount):
        model.objects.filter(user=user).delete()
    for session in UserSession.objects.filter(user=user):
        session.end()
    user.email = f"erased-{user.public_id.hex}@erased.invalid"
    user.first_name = user.last_name = ""
    user.is_active = False
    user.set_unusable_password()
    user.save(update_fields=["email", "first_name", "last_name", "is_active", "password"])


def _erase_audit(tenant: Tenant, people: list[User]) -> None:
    with connection.cursor() as cursor:
        # The trigger lets exactly these columns go, and only where this is set (migration 0010).
        cursor.execute("SET LOCAL weir.erasing = 'on'")
        cursor.execute(_ERASE_AUDIT, {"tenant": tenant.pk, "users": [user.pk for user in people]})
        cursor.execute("SET LOCAL weir.erasing = 'off'")
