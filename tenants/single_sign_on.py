"""People who come by their tenant's own provider (models/sign_on.py), where django-allauth asks us.

A provider answers for the addresses of its domain and nothing else: it opens no account that it did not make, whatever
address it claims. Who has a password here connects the two, signed in. Members are made once, at the first coming:
who was removed stays out.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.signals import social_account_added
from django.db import transaction
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from tenants.client_address import client_address
from tenants.models import Membership, Role, TenantSignOn, User
from tenants.principal_selectors import find_sign_on, sign_on_of_app
from tenants.services.audit import Actor, record_audit
from tenants.services.people import know_address


class SignOnAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth is untyped
    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        return True  # pre_social_login has refused whoever may not

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        sign_on = sign_on_of_app(sociallogin.account.provider)
        if sign_on is None or sign_on.tenant.purged_at is not None:
            raise _refused(request, "This way of signing in is switched off.")
        if sociallogin.is_existing:
            return
        confirmed = [address.email for address in sociallogin.email_addresses if address.verified]
        fitting = [email for email in confirmed if email.rpartition("@")[2].lower() == sign_on.domain]
        if not fitting:
            raise _refused(
                request, f"The provider did not confirm an address of {sign_on.domain}. Ask whoever runs it."
            )
        email = fitting[0].lower()
        if request.user.is_authenticated:
            if request.user.email != email:
                raise _refused(
                    request, f"You are signed in as {request.user.email}, but the provider says {email}."
                )
        elif User.objects.filter(email=email).exists():
            raise _refused(
                request,
                f"{email} has an account with a password. Sign in with it, then connect the two under "
                "Your account, Single sign-on.",
            )
        sociallogin.user.email = email

    def save_user(self, request: HttpRequest, sociallogin: Any, form: Any = None) -> User:
        with transaction.atomic():
            user: User = super().save_user(request, sociallogin, form)
            know_address(user, is_confirmed=True)
            actor = Actor.person(user, ip_address=client_address(request))
            record_audit(actor=actor, action="user.created", tenant=None, target=user)
            _join(request, user, sociallogin.account.provider)
        return user


@receiver(social_account_added)
def _connected(request: HttpRequest, sociallogin: Any, **_: Any) -> None:
    with transaction.atomic():
        _join(request, sociallogin.user, sociallogin.account.provider)


def _join(request: HttpRequest, user: User, provider_id: str) -> None:
    sign_on = sign_on_of_app(provider_id)
    assert sign_on is not None
    membership, is_new = Membership.objects.get_or_create(
        tenant=sign_on.tenant, user=user, defaults={"role": Role(sign_on.default_role)}
    )
    if is_new:
        record_audit(
            actor=Actor.person(user, ip_address=client_address(request)),
            action="member.came_by_sign_on",
            tenant=sign_on.tenant,
            target=membership,
            after={"user": user.email, "role": membership.role, "domain": sign_on.domain},
        )


@never_cache
@require_safe
def single_sign_on(request: HttpRequest) -> HttpResponse:
    """Asks for an address, and leads to the provider of its domain; `?process=connect` connects it to the account."""
    email = request.GET.get("email", "").strip().lower()
    sign_on = find_sign_on(email.rpartition("@")[2]) if email else None
    context: dict[str, Any] = {"email": email, "sign_on": sign_on, "asked": bool(email)}
    if sign_on is not None:
        context["onward"] = onward(sign_on, connect=request.user.is_authenticated)
    return render(request, "tenants/single_sign_on.html", context)


def onward(sign_on: TenantSignOn, *, connect: bool) -> str:
    path = reverse("openid_connect_login", args=[sign_on.app.provider_id])
    return f"{path}?{urlencode({'process': 'connect'})}" if connect else path


def _refused(request: HttpRequest, words: str) -> ImmediateHttpResponse:
    return ImmediateHttpResponse(
        render(request, "tenants/sign_on_refused.html", {"words": words}, status=403)
    )
