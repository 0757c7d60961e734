"""How people sign in, where django-allauth asks us: addresses, secrets at rest, and what is put on record."""

from __future__ import annotations

import base64
from typing import Any, cast

from allauth.account.adapter import DefaultAccountAdapter
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.utils import is_mfa_enabled
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.utils.deprecation import MiddlewareMixin

from tenants.client_address import client_address
from tenants.models import User
from tenants.services.people import know_address

_STAFF_PATHS = ("/admin/", "/operator/")


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth is untyped
    error_messages = DefaultAccountAdapter.error_messages | {
        "email_password_mismatch": "That e-mail address and password do not match an account.",
        "too_many_login_attempts": "Too many failed attempts. Wait five minutes, then try again.",
    }

    def get_client_ip(self, request: HttpRequest) -> str:
        """As everywhere in Weir: a header that a client can send counts only behind the known proxy."""
        address = client_address(request)
        if address is None:
            raise PermissionDenied("the client has no address")
        return address

    def pre_login(self, request: HttpRequest, user: Any, **kwargs: Any) -> HttpResponseBase | None:
        know_address(user)  # of an account that the operator made, or gave another address
        response: HttpResponseBase | None = super().pre_login(request, user, **kwargs)
        return response

    def confirm_email(self, request: HttpRequest, email_address: Any) -> bool:
        # allauth looks at confirmed addresses alone; an account that nobody has signed in to yet has none.
        others = User.objects.exclude(pk=email_address.user_id)
        if others.filter(email=email_address.email).exists():
            return False
        return bool(super().confirm_email(request, email_address))


class MfaAdapter(DefaultMFAAdapter):  # type: ignore[misc]
    """Keeps the secrets of second factors encrypted: a stolen database gives no codes."""

    def encrypt(self, text: str) -> str:
        return _fernet().encrypt(text.encode()).decode("ascii")

    def decrypt(self, encrypted_text: str) -> str:
        return _fernet().decrypt(encrypted_text.encode("ascii")).decode()


def _fernet() -> Fernet:
    # The pepper is the one secret that is kept outside the database and never rotated.
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"weir second factors").derive(
        settings.API_KEY_PEPPER.encode()
    )
    return Fernet(base64.urlsafe_b64encode(derived))


class StaffMfaMiddleware(MiddlewareMixin):
    """With WEIR_STAFF_MFA, the operator's pages open only to those who have a second factor."""

    def process_request(self, request: HttpRequest) -> HttpResponseBase | None:
        if not settings.STAFF_NEED_MFA or not request.path_info.startswith(_STAFF_PATHS):
            return None
        user = cast(Any, request).user
        if not user.is_authenticated or is_mfa_enabled(user):
            return None
        messages.warning(
            request, "Operators need a second factor here. Set one up, then go back to the admin."
        )
        return redirect("mfa_index")
