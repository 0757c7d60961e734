"""What people do to their own accounts, in the audit log. Signals, because django-allauth offers nothing else."""

from __future__ import annotations

from typing import Any

from allauth.account import signals as account
from allauth.mfa import signals as mfa
from django.db import transaction
from django.dispatch import receiver
from django.http import HttpRequest

from tenants.client_address import client_address
from tenants.models import User
from tenants.services.audit import Actor, record_audit


def _record(request: HttpRequest, user: User, action: str, **after: Any) -> None:
    with transaction.atomic():
        record_audit(
            actor=Actor.person(user, ip_address=client_address(request)),
            action=action,
            tenant=None,
            target=user,
            after=after or None,
        )


@receiver(account.user_logged_in)
def _signed_in(request: HttpRequest, user: User, **_: Any) -> None:
    _record(request, user, "user.signed_in")


@receiver([account.password_changed, account.password_set])
def _password_changed(request: HttpRequest, user: User, **_: Any) -> None:
    _record(request, user, "user.password_changed")


@receiver(account.password_reset)
def _password_reset(request: HttpRequest, user: User, **_: Any) -> None:
    _record(request, user, "user.password_reset")


@receiver(account.email_changed)
def _email_changed(request: HttpRequest, user: User, to_email_address: Any, **_: Any) -> None:
    _record(request, user, "user.email_changed", email=to_email_address.email)


@receiver(mfa.authenticator_added)
def _factor_added(request: HttpRequest, user: User, authenticator: Any, **_: Any) -> None:
    _record(request, user, "user.factor_added", type=authenticator.type)


@receiver(mfa.authenticator_removed)
def _factor_removed(request: HttpRequest, user: User, authenticator: Any, **_: Any) -> None:
    _record(request, user, "user.factor_removed", type=authenticator.type)
