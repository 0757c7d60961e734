"""The start of an empty installation: its first operator, by a link that only its own shell prints; its first tenant.

The link is signed, not stored: every gateway that shares WEIR_SECRET_KEY knows it, and it opens nothing once there is
an operator. Coming from this machine is no proof of anything: behind a proxy everybody does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core import signing
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.urls import reverse

from tenants.models import ApiKey, Tenant, Tier, User
from tenants.services.audit import Actor, record_audit
from tenants.services.people import know_address
from tenants.services.tenants import create_tenant

LINK_HOURS: Final = 24
_SALT: Final = "weir.first-run"
_LOCK: Final = 0x7765_6972_6669_7273
"""Key of the advisory lock of all who set the installation up: "weirfirs"."""


class SetupClosed(Exception):
    """It is set up already, or the link is none of ours, or too old."""


def has_operator() -> bool:
    """Also one that is switched off: whoever did that operates this installation."""
    return User.objects.filter(is_superuser=True).exists()


def setup_link() -> str:
    """Opens the page that makes the first operator, for a day."""
    token = signing.TimestampSigner(salt=_SALT).sign("operator")
    return f"{settings.BASE_URL}{reverse('setup_operator', args=[token])}"


def setup_command() -> str:
    """What prints the link, where manage.py is; with the Python that has Weir's packages, if it is below."""
    python = Path(sys.executable)
    name = python.relative_to(settings.BASE_DIR) if python.is_relative_to(settings.BASE_DIR) else "python"
    return f"{name} manage.py setup_link"


def check_setup_token(token: str) -> None:
    """Raises SetupClosed."""
    try:
        signing.TimestampSigner(salt=_SALT).unsign(token, max_age=LINK_HOURS * 3600)
    except signing.BadSignature as error:
        raise SetupClosed from error
    if has_operator():
        raise SetupClosed


@transaction.atomic
def create_first_operator(*, token: str, email: str, password: str, ip_address: str | None = None) -> User:
    """Of two who hold the link and come at once, one becomes the operator.

    Raises SetupClosed, or ValidationError for an address or a password that won't do.
    """
    _one_at_a_time()
    check_setup_token(token)
    if User.objects.filter(email=email).exists():
        raise ValidationError({"email": "There is an account with this address already."})
    try:
        validate_password(password, User(email=email))
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from error
    user = User.objects.create_superuser(email, password)
    know_address(user, is_confirmed=True)
    actor = Actor.person(user, ip_address=ip_address)
    record_audit(actor=actor, action="user.created", tenant=None, target=user)
    return user


@transaction.atomic
def create_first_tenant(*, actor: Actor, name: str, tier: Tier, owner: User) -> Tenant:
    """Raises SetupClosed when there is one, or ValidationError for a name that won't do."""
    _one_at_a_time()
    if Tenant.objects.exists():
        raise SetupClosed
    return create_tenant(actor=actor, name=name, tier=tier, owner=owner)


@dataclass(frozen=True, slots=True)
class Setup:
    """How far an installation with an operator has come."""

    tenant: Tenant | None
    """The first."""
    is_done: bool


def read_setup() -> Setup:
    tenants = list(Tenant.objects.select_related("tier").order_by("id")[:2])
    if not tenants:
        return Setup(None, is_done=False)
    tenant = tenants[0]
    is_done = len(tenants) > 1 or tenant.is_suspended or ApiKey.objects.for_tenant(tenant.pk).exists()
    return Setup(tenant, is_done)


def _one_at_a_time() -> None:
    """Until the end of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
