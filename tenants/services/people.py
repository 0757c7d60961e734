"""Accounts of people: each has one address, which is also what they sign in by."""

from __future__ import annotations

from allauth.account.models import EmailAddress
from django.conf import settings
from django.db import transaction

from tenants.models import User


@transaction.atomic
def know_address(user: User, *, is_confirmed: bool = False) -> None:
    """Makes the address that django-allauth confirms and mails to the one that the account has.

    Where everyone must confirm theirs, it counts as confirmed only when that was shown; elsewhere whoever made the
    account vouches for it.
    """
    is_confirmed |= settings.ACCOUNT_EMAIL_VERIFICATION != "mandatory"
    rows = EmailAddress.objects.filter(user=user)
    mine = rows.filter(email=user.email).first()
    rows.exclude(email=user.email).filter(primary=True).delete()  # one that waits to be confirmed stays
    if mine is None:
        EmailAddress.objects.create(user=user, email=user.email, primary=True, verified=is_confirmed)
    elif not mine.primary or (is_confirmed and not mine.verified):
        mine.primary, mine.verified = True, mine.verified or is_confirmed
        mine.save(update_fields=["primary", "verified"])
