"""A tenant's own sign-in, against a real provider on loopback: who comes in, as what, and who must not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.test import Client
from django.urls import reverse

from tenants.models import AuditEntry, Membership, Role, TenantSignOn, User
from tenants.services.sign_on import set_sign_on
from tests.factories import PASSWORD, TEST, Cast, make_user
from tests.tenants.oidc_provider import CLIENT_ID, CLIENT_SECRET, Provider, running_provider

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def the_provider() -> Iterator[Provider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def provider(the_provider: Provider) -> Provider:
    the_provider.audience = CLIENT_ID
    the_provider.person = {"sub": "42", "email": "ada@acme.example", "email_verified": True, "name": "Ada"}
    return the_provider


@pytest.fixture
def sign_on(cast: Cast, provider: Provider) -> TenantSignOn:
    return set_sign_on(
        actor=TEST,
        tenant=cast.tenant,
        domain="acme.example",
        issuer=provider.issuer,
        client_id=CLIENT_ID,
        secret=CLIENT_SECRET,
        default_role=Role.VIEWER,
    )


def come(client: Client, email: str = "ada@acme.example") -> Any:
    """From the page that asks for an address, through the provider, back to us."""
    page = client.get("/sso/", {"email": email}).content.decode()
    onward = re.search(r'href="(/oidc/[^"]+)"', page)
    assert onward, page
    to_provider = client.get(onward[1].replace("&amp;", "&"))
    assert to_provider.status_code == 302
    back = httpx.get(to_provider.headers["Location"], timeout=30).headers["Location"]
    assert back.startswith("http://testserver/")
    return client.get(back.removeprefix("http://testserver"))


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def test_who_comes_first_becomes_a_member_and_comes_back_as_the_same(cast, sign_on):
    client = Client()
    assert come(client).status_code == 302
    assert is_signed_in(client)
    user = User.objects.get(email="ada@acme.example")
    assert Membership.objects.get(tenant=cast.tenant, user=user).role == Role.VIEWER
    assert not user.has_usable_password()
    assert not user.is_staff
    assert AuditEntry.objects.filter(tenant=cast.tenant, action="member.came_by_sign_on").count() == 1
    assert client.get(f"/t/{cast.tenant.public_id}/").status_code == 200
    assert client.get(f"/t/{cast.other_tenant.public_id}/").status_code == 404

    again = Client()
    come(again)
    assert again.session["_auth_user_id"] == str(user.pk)
    assert User.objects.filter(email="ada@acme.example").count() == 1


def test_who_was_removed_stays_out(cast, sign_on):
    come(Client())
    Membership.objects.for_tenant(cast.tenant).filter(user__email="ada@acme.example").delete()
    client = Client()
    come(client)
    assert is_signed_in(client)
    assert client.get(f"/t/{cast.tenant.public_id}/").status_code == 404


@pytest.mark.parametrize(
    "claims",
    [
        {"email": "eve@elsewhere.example"},
        {"email": "eve@notacme.example"},
        {"email": "eve@acme.example.evil.example"},
        {"email_verified": False},
        {"email": ""},
    ],
)
def test_a_provider_answers_for_its_own_domain_alone(cast, sign_on, provider, claims):
    provider.person |= claims
    client = Client()
    answer = come(client)
    assert answer.status_code == 403
    assert b"did not confirm an address of acme.example" in answer.content
    assert not is_signed_in(client)
    assert not Membership.objects.for_tenant(cast.tenant).filter(user__email__startswith="eve").exists()


def test_it_opens_no_account_that_it_did_not_make(cast, sign_on):
    ada = make_user("ada@acme.example", is_staff=True, is_superuser=True)
    client = Client()
    assert b"has an account with a password" in come(client).content
    assert not is_signed_in(client)
    # Signed in with the password, she connects the two.
    client.post("/login/", {"login": ada.email, "password": PASSWORD})
    assert b"Connect" in client.get("/sso/", {"email": ada.email}).content
    come(client)
    assert Membership.objects.get(tenant=cast.tenant, user=ada).role == Role.VIEWER
    later = Client()
    come(later)
    assert later.session["_auth_user_id"] == str(ada.pk)


def test_another_person_does_not_connect(cast, sign_on):
    client = Client()
    client.force_login(cast.outsider)
    assert b"but the provider says" in come(client).content
    assert not Membership.objects.for_tenant(cast.tenant).filter(user=cast.outsider).exists()


def test_a_token_for_another_client_opens_nothing(sign_on, provider):
    provider.audience = "somebody else"
    client = Client()
    come(client)
    assert not is_signed_in(client)


def test_a_second_factor_is_asked_for_here_too(cast, sign_on):
    from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
    from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret

    come(Client())
    user = User.objects.get(email="ada@acme.example")
    TOTP.activate(user, generate_totp_secret())
    RecoveryCodes.activate(user)
    client = Client()
    assert come(client).headers["Location"].startswith("/2fa/authenticate/")
    assert not is_signed_in(client)


def test_an_unknown_domain_is_told_so_and_none_is_listed(sign_on):
    page = Client().get("/sso/", {"email": "bob@nowhere.example"}).content.decode()
    assert "No single sign-on" in page
    assert "acme" not in page
    assert "acme" not in Client().get("/sso/").content.decode()
    assert "acme" not in Client().get("/login/").content.decode()


def test_what_can_not_be_set(cast, sign_on, provider):
    good: dict[str, Any] = {
        "domain": "other.example",
        "issuer": provider.issuer,
        "client_id": CLIENT_ID,
        "secret": CLIENT_SECRET,
        "default_role": Role.VIEWER,
    }
    for wrong in (
        {"domain": "acme.example"},
        {"domain": "no domain"},
        {"issuer": "ftp://x"},
        {"default_role": Role.OWNER},
    ):
        with pytest.raises(ValidationError):
            set_sign_on(actor=TEST, tenant=cast.other_tenant, **(good | wrong))
    with pytest.raises(IntegrityError), transaction.atomic():
        TenantSignOn.objects.for_tenant(cast.tenant).update(default_role="owner")
    entry = AuditEntry.objects.filter(tenant=cast.tenant, action="sign_on.set").get()
    assert CLIENT_SECRET not in str(entry.after)


def test_the_operator_sets_it_in_the_admin(cast, provider):
    operator = Client()
    operator.force_login(cast.operator)
    add = reverse("admin:tenants_tenantsignon_add")
    form = {
        "tenant": cast.tenant.pk,
        "domain": "Acme.example",
        "issuer": provider.issuer,
        "client_id": CLIENT_ID,
        "secret": CLIENT_SECRET,
        "default_role": "viewer",
    }
    for wrong in ({"default_role": "owner"}, {"issuer": "ftp://acme.example"}, {"domain": "no domain"}):
        assert operator.post(add, form | wrong).status_code == 200
    assert operator.post(add, form).status_code == 302
    row = TenantSignOn.objects.for_tenant(cast.tenant).get()
    change = reverse("admin:tenants_tenantsignon_change", args=[row.pk])
    page = operator.get(change).content.decode()
    assert f"/oidc/{row.app.provider_id}/login/callback/" in page
    assert CLIENT_SECRET not in page
    # An empty secret keeps the one that is there.
    assert operator.post(change, form | {"secret": "", "default_role": "developer"}).status_code == 302
    row = TenantSignOn.objects.for_tenant(cast.tenant).select_related("app").get()
    assert (row.default_role, row.app.secret) == ("developer", CLIENT_SECRET)
    come(Client())
    assert Membership.objects.for_tenant(cast.tenant).filter(user__email="ada@acme.example").exists()
    delete = reverse("admin:tenants_tenantsignon_delete", args=[row.pk])
    assert operator.post(delete, {"post": "yes"}).status_code == 302
    assert not TenantSignOn.objects.for_tenant(cast.tenant).exists()
    told = AuditEntry.objects.filter(tenant=cast.tenant, action__startswith="sign_on.").order_by("id")
    assert [(entry.action, entry.actor_user) for entry in told] == [
        ("sign_on.set", cast.operator),
        ("sign_on.set", cast.operator),
        ("sign_on.removed", cast.operator),
    ]
