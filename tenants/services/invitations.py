"""Invitations: made, sent again, revoked, accepted once.

The link holds HMAC(pepper, id and serial): a dump of the database gives no link, and the task that mails it can
make it again, so that a mail server that is away loses none.
"""

from __future__ import annotations

import base64
import hmac
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Final
from uuid import UUID

import structlog
from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.mail import send_mail
from django.core.validators import validate_email
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone

from tenants.models import Invitation, Membership, Role, Tenant, User
from tenants.rights import may_give
from tenants.services.audit import Actor, record_audit
from tenants.services.members import NotAllowedToManage
from tenants.services.people import know_address

log = structlog.get_logger(__name__)

VALID_FOR: Final = timedelta(days=7)
_OPEN_MAX: Final = 200
_LINKS_MAX: Final = 10
"""So many links are made for one invitation: nobody's mailbox is filled by us."""
_RETRY_AFTER: Final = timedelta(minutes=1)


class InvitationClosed(Exception):
    """Used, revoked, expired, of a suspended tenant, or never made: to a stranger they are the same."""


class WrongPerson(Exception):
    """The invitation is for another address than that of who is signed in."""

    def __init__(self, invitation: Invitation) -> None:
        super().__init__(f"this invitation is for {invitation.email}")
        self.invitation = invitation


class AccountExists(Exception):
    """Who is invited has an account: they accept signed in."""


def invite_member(*, actor: Actor, by: Role, tenant: Tenant, email: str, role: Role) -> Invitation:
    """Raises NotAllowedToManage, or django.core.exceptions.ValidationError when a value won't do."""
    if not may_give(by, role):
        raise NotAllowedToManage
    email = email.strip().lower()
    validate_email(email)
    with transaction.atomic():
        Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
        if Membership.objects.for_tenant(tenant).filter(user__email=email).exists():
            raise ValidationError("They are a member already.")
        open_ones = Invitation.objects.for_tenant(tenant).filter(accepted_at=None, revoked_at=None)
        if open_ones.filter(email=email).exists():
            raise ValidationError("They are invited already: send that invitation again, or revoke it first.")
        if open_ones.count() >= _OPEN_MAX:
            raise ValidationError(f"{_OPEN_MAX} invitations are open: revoke some first.")
        invitation = Invitation.objects.create(
            tenant=tenant,
            email=email,
            role=role,
            invited_by=actor.user,
            expires_at=timezone.now() + VALID_FOR,
        )
        record_audit(
            actor=actor,
            action="invitation.made",
            tenant=tenant,
            target=invitation,
            after={"email": email, "role": role, "expires_at": invitation.expires_at},
        )
    return invitation


def resend_invitation(*, actor: Actor, by: Role, invitation: Invitation) -> Invitation:
    """A new link with a new end; the one before stops working. Raises NotAllowedToManage or ValidationError."""
    if not may_give(by, Role(invitation.role)):
        raise NotAllowedToManage
    with transaction.atomic():
        current = _open(Invitation.objects.for_tenant(invitation.tenant_id).filter(pk=invitation.pk))
        if current.serial >= _LINKS_MAX:
            raise ValidationError("It was sent often enough: revoke it, and ask them by another way.")
        current.serial += 1
        current.expires_at = timezone.now() + VALID_FOR
        current.mailed_at = current.mail_tried_at = None
        current.save(update_fields=["serial", "expires_at", "mailed_at", "mail_tried_at"])
        record_audit(
            actor=actor,
            action="invitation.sent_again",
            tenant=current.tenant,
            target=current,
            after={"email": current.email, "expires_at": current.expires_at},
        )
    return current


def revoke_invitation(*, actor: Actor, by: Role, invitation: Invitation) -> bool:
    """False when it was not open any more. Raises NotAllowedToManage."""
    if not may_give(by, Role(invitation.role)):
        raise NotAllowedToManage
    with transaction.atomic():
        rows = Invitation.objects.for_tenant(invitation.tenant_id).filter(pk=invitation.pk)
        changed = rows.filter(accepted_at=None, revoked_at=None).update(revoked_at=timezone.now())
        if changed:
            record_audit(
                actor=actor,
                action="invitation.revoked",
                tenant=invitation.tenant,
                target=invitation,
                before={"email": invitation.email, "role": invitation.role},
            )
    return bool(changed)


def invitation_link(invitation: Invitation) -> str:
    path = reverse("invitation", args=[invitation.public_id, _token(invitation)])
    return f"{settings.BASE_URL}{path}"


def find_invitation(public_id: UUID, token: str) -> Invitation:
    """The open invitation of a link. Raises InvitationClosed."""
    invitation = (
        Invitation.unscoped.select_related("tenant", "invited_by").filter(public_id=public_id).first()
    )
    # Compared also where there is none: the time taken tells nothing.
    expected = _token(invitation or Invitation(public_id=public_id))
    if (
        not hmac.compare_digest(expected, token)
        or invitation is None
        or not _is_open(invitation, timezone.now())
    ):
        raise InvitationClosed
    return invitation


def accept_invitation(*, actor: Actor, public_id: UUID, token: str, user: User) -> Membership:
    """Makes the person a member, once. Who is one already keeps the role that they have.

    Raises InvitationClosed or WrongPerson.
    """
    find_invitation(public_id, token)
    with transaction.atomic():
        rows = Invitation.unscoped.select_for_update(of=("self",)).select_related("tenant")
        invitation = rows.get(public_id=public_id)
        # Looked at again under the lock: of two who accept at once, one finds it used.
        if not hmac.compare_digest(_token(invitation), token) or not _is_open(invitation, timezone.now()):
            raise InvitationClosed
        if user.email != invitation.email or not user.is_active:
            raise WrongPerson(invitation)
        invitation.accepted_at = timezone.now()
        invitation.save(update_fields=["accepted_at"])
        membership, is_new = Membership.objects.get_or_create(
            tenant=invitation.tenant, user=user, defaults={"role": invitation.role}
        )
        record_audit(
            actor=actor,
            action="invitation.accepted",
            tenant=invitation.tenant,
            target=membership,
            after={"user": user.email, "role": membership.role, "was_member": not is_new},
        )
    return membership


def accept_as_new_person(
    *, public_id: UUID, token: str, password: str, ip_address: str | None = None
) -> Membership:
    """Makes the account of the invited address as well. Where the link was mailed, the address is confirmed by it.

    Raises InvitationClosed, AccountExists, or ValidationError for a password that won't do.
    """
    invitation = find_invitation(public_id, token)
    if User.objects.filter(email=invitation.email).exists():
        raise AccountExists
    validate_password(password, User(email=invitation.email))
    try:
        with transaction.atomic():
            user = User.objects.create_user(invitation.email, password)
            know_address(user, is_confirmed=invitation.mailed_at is not None)
            actor = Actor.person(user, ip_address=ip_address)
            record_audit(actor=actor, action="user.created", tenant=None, target=user)
            return accept_invitation(actor=actor, public_id=public_id, token=token, user=user)
    except IntegrityError:
        raise AccountExists from None


def mail_invitations() -> int:
    """Mails the links that wait; what the mail server refuses is tried again after a minute. Says how many went."""
    if not settings.MAIL_IS_SENT:
        return 0
    sent = 0
    while (invitation := _claim_for_mail()) is not None:
        context = {"invitation": invitation, "link": invitation_link(invitation)}
        subject = f"[Weir] Join {invitation.tenant.name}"
        try:
            send_mail(
                " ".join(subject.split()),
                render_to_string("tenants/mail/invitation.txt", context),
                None,
                [invitation.email],
            )
        except OSError as error:  # SMTPException is one
            log.warning("invitation_not_mailed", invitation=str(invitation.public_id), error=str(error)[:200])
            continue
        rows = Invitation.objects.for_tenant(invitation.tenant_id).filter(pk=invitation.pk)
        sent += rows.filter(serial=invitation.serial).update(mailed_at=timezone.now())
    return sent


def _claim_for_mail() -> Invitation | None:
    now = timezone.now()
    with transaction.atomic():
        waiting = Invitation.unscoped.select_for_update(of=("self",), skip_locked=True).filter(
            Q(mail_tried_at=None) | Q(mail_tried_at__lt=now - _RETRY_AFTER),
            mailed_at=None,
            accepted_at=None,
            revoked_at=None,
            expires_at__gt=now,
            tenant__suspended_at=None,
        )
        invitation = waiting.select_related("tenant", "invited_by").order_by("id").first()
        if invitation is not None:
            invitation.mail_tried_at = now
            invitation.save(update_fields=["mail_tried_at"])
    return invitation


def _open(rows: QuerySet[Invitation]) -> Invitation:
    invitation = rows.select_for_update(of=("self",)).select_related("tenant").first()
    if invitation is None or invitation.accepted_at is not None or invitation.revoked_at is not None:
        raise ValidationError("This invitation is not open any more.")
    return invitation


def _is_open(invitation: Invitation, now: datetime) -> bool:
    return (
        invitation.accepted_at is None
        and invitation.revoked_at is None
        and invitation.expires_at > now
        and not invitation.tenant.is_suspended
    )


def _token(invitation: Invitation) -> str:
    message = f"invitation:{invitation.public_id}:{invitation.serial}".encode()
    digest = hmac.new(settings.API_KEY_PEPPER.encode(), message, sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
