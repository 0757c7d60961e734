"""Signing in: passwords, lock-out, second factors, sessions, confirmed addresses, forgotten passwords."""

from __future__ import annotations

import re
import time
from itertools import count

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value
from django.core import mail
from django.test import Client

from tenants.models import AuditEntry
from tests.factories import PASSWORD, make_operator, make_user

pytestmark = pytest.mark.django_db

_addresses = (f"203.0.113.{number}" for number in count(1))


@pytest.fixture
def client() -> Client:
    """From an address of its own: guesses are counted in Valkey, which the tests share."""
    return Client(REMOTE_ADDR=next(_addresses))


def sign_in(client: Client, email: str, password: str = PASSWORD, **headers: str):
    return client.post("/login/", {"login": email, "password": password}, headers=headers or None)


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def totp(secret: str) -> str:
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30))


def turn_on_totp(client: Client) -> str:
    client.post("/reauthenticate/", {"password": PASSWORD})
    page = client.get("/2fa/totp/activate/")
    secret = re.search(r'id="authenticator_secret"[^>]*value="(\w+)"', page.content.decode())
    assert secret
    assert client.post("/2fa/totp/activate/", {"code": totp(secret[1])}).status_code == 302
    return secret[1]


def test_guessing_at_one_account_is_locked_out_from_every_address(client):
    user = make_user()
    for _ in range(5):
        assert (
            b"do not match an account"
            in sign_in(Client(REMOTE_ADDR=next(_addresses)), user.email, "no").content
        )
    locked = sign_in(client, user.email)
    assert b"Too many failed attempts" in locked.content
    assert not is_signed_in(client)
    # Nobody else is.
    sign_in(client, make_user().email)
    assert is_signed_in(client)


def test_guessing_from_one_address_is_locked_out_for_every_account(client):
    for _ in range(10):
        sign_in(client, make_user().email, "no")
    user = make_user()
    assert b"Too many failed attempts" in sign_in(client, user.email).content
    sign_in(elsewhere := Client(REMOTE_ADDR=next(_addresses)), user.email)
    assert is_signed_in(elsewhere)


def test_the_address_that_counts_is_the_one_that_the_proxy_saw(client, settings):
    settings.BEHIND_PROXY = True
    victim = next(_addresses)
    for number in range(10):
        # What a client writes into the header itself changes nothing: the proxy's entry is the last.
        forwarded = f"198.51.100.{number}, {victim}"
        sign_in(client, make_user().email, "no", **{"X-Forwarded-For": forwarded})
    user = make_user()
    assert (
        b"Too many" in sign_in(client, user.email, **{"X-Forwarded-For": f"198.51.100.99, {victim}"}).content
    )
    sign_in(client, user.email, **{"X-Forwarded-For": next(_addresses)})
    assert is_signed_in(client)


def test_success_is_not_counted_as_a_guess(client):
    user = make_user()
    for _ in range(7):
        sign_in(client, user.email)
        assert is_signed_in(client)
        client.post("/logout/")


def test_an_authenticator_app_and_its_recovery_codes(client, django_capture_on_commit_callbacks):
    user = make_user()
    sign_in(client, user.email)
    with django_capture_on_commit_callbacks(execute=True):
        secret = turn_on_totp(client)
    stored = Authenticator.objects.get(user=user, type="totp")
    assert secret not in str(stored.data)  # encrypted at rest
    codes = Authenticator.objects.get(user=user, type="recovery_codes").wrap().get_unused_codes()
    assert len(codes) == 10

    client.post("/logout/")
    assert sign_in(client, user.email).headers["Location"].startswith("/2fa/authenticate/")
    assert not is_signed_in(client)
    assert b"Incorrect code" in client.post("/2fa/authenticate/", {"code": "000000"}).content
    assert not is_signed_in(client)
    client.post("/2fa/authenticate/", {"code": codes[0]})
    assert is_signed_in(client)

    client.post("/logout/")
    sign_in(client, user.email)
    client.post("/2fa/authenticate/", {"code": codes[0]})
    assert not is_signed_in(client)  # once each
    actions = AuditEntry.unscoped.filter(actor_user=user).values_list("action", flat=True)
    assert {"user.signed_in", "user.factor_added"} <= set(actions)


def test_codes_of_a_second_factor_are_locked_out_too(client):
    user = make_user()
    sign_in(client, user.email)
    secret = turn_on_totp(client)
    client.post("/logout/")
    sign_in(client, user.email)
    for _ in range(5):
        client.post("/2fa/authenticate/", {"code": "000000"})
    client.post("/2fa/authenticate/", {"code": totp(secret)})
    assert not is_signed_in(client)


def test_the_operators_admin_goes_the_same_way_in(client):
    operator = make_operator()
    for method in (client.get, client.post):
        answer = method("/admin/login/?next=/admin/")
        assert answer.headers["Location"].startswith("/login/?next=")
    sign_in(client, operator.email)
    answer = client.get("/admin/", follow=True)
    assert answer.redirect_chain == [("/admin/live/", 302)]
    assert answer.status_code == 200


def test_operators_can_be_held_to_a_second_factor(client, settings):
    settings.STAFF_NEED_MFA = True
    sign_in(client, make_operator().email)
    for path in ("/admin/", "/admin/live/", "/operator/live"):
        assert client.get(path).headers["Location"] == "/2fa/"
    assert b"second factor" in client.get("/2fa/").content
    turn_on_totp(client)
    assert client.get("/admin/", follow=True).status_code == 200
    assert client.get("/admin/live/").status_code == 200


def test_signing_out_everywhere_else(client):
    user = make_user()
    client.defaults["HTTP_USER_AGENT"] = (
        "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/131.0.0.0 Safari/537.36"
    )
    sign_in(client, user.email)
    other = Client(REMOTE_ADDR=next(_addresses), HTTP_USER_AGENT="<b>Other</b>")
    sign_in(other, user.email)
    page = client.get("/sessions/").content.decode()
    assert ">Chrome 131 on Linux<" in page
    assert "&lt;b&gt;Other" in page
    assert "this one" in page
    client.post("/sessions/")
    assert is_signed_in(client)
    assert other.get("/sessions/").status_code == 302
    assert "Other" not in client.get("/sessions/").content.decode()


def test_a_forgotten_password_is_set_anew_and_ends_other_sessions(client, settings):
    settings.MAIL_IS_SENT = True
    user = make_user()
    sign_in(other := Client(REMOTE_ADDR=next(_addresses)), user.email)
    assert client.post("/password/reset/", {"email": user.email}).status_code == 302
    link = re.search(r"http://testserver(/password/reset/key/\S+)", mail.outbox[0].body)
    assert link
    form = client.get(link[1], follow=True)
    url = form.redirect_chain[-1][0]
    weak = client.post(url, {"password1": "password", "password2": "password"})
    assert b"too common" in weak.content
    client.post(url, {"password1": "a new, longer one", "password2": "a new, longer one"})
    assert other.get("/sessions/").status_code == 302
    sign_in(client, user.email, "a new, longer one")
    assert is_signed_in(client)
    # The link has done its work.
    assert b"invalid" in Client(REMOTE_ADDR=next(_addresses)).get(link[1], follow=True).content.lower()
    assert AuditEntry.unscoped.filter(actor_user=user, action="user.password_reset").exists()


def test_nobody_learns_who_has_an_account(client):
    known, unknown = make_user().email, "nobody@example.org"
    answers = [client.post("/password/reset/", {"email": email}) for email in (known, unknown)]
    assert answers[0].headers["Location"] == answers[1].headers["Location"]
    assert [message.to for message in mail.outbox] == [[known]]
    pages = [sign_in(client, email, "no").content.decode() for email in (known, unknown)]
    assert "do not match an account" in pages[0]
    assert "do not match an account" in pages[1]


def test_without_mail_the_page_says_who_can_help(client, settings):
    settings.MAIL_IS_SENT = False
    assert b"sends no mail" in client.get("/password/reset/").content


def test_where_confirmed_addresses_are_demanded_the_link_opens_the_door(client, settings):
    settings.ACCOUNT_EMAIL_VERIFICATION = "mandatory"
    user = make_user()
    assert sign_in(client, user.email).headers["Location"] == "/confirm-email/"
    assert not is_signed_in(client)
    link = re.search(r"http://testserver(/confirm-email/\S+/)", mail.outbox[0].body)
    assert link
    client.get(link[1])  # what a mail scanner does
    assert not EmailAddress.objects.get(user=user).verified
    client.post(link[1])
    assert EmailAddress.objects.get(user=user).verified
    sign_in(client, user.email)
    assert is_signed_in(client)


def test_a_new_address_counts_when_it_is_confirmed(client, settings):
    settings.MAIL_IS_SENT = True
    user = make_user()
    sign_in(client, user.email)
    old, new = user.email, f"new-{user.email}"
    client.post("/email/", {"email": new, "action_add": ""})
    user.refresh_from_db()
    assert user.email == old
    link = re.search(r"http://testserver(/confirm-email/\S+/)", mail.outbox[-1].body)
    assert link
    client.post(link[1])
    user.refresh_from_db()
    assert user.email == new
    taken = make_user().email
    client.post("/email/", {"email": taken, "action_add": ""})
    for message in mail.outbox:
        if message.to == [taken] and (
            link := re.search(r"http://testserver(/confirm-email/\S+/)", message.body)
        ):
            client.post(link[1])
    user.refresh_from_db()
    assert user.email == new


def test_nobody_signs_up(client):
    assert b"Nobody signs up here" in client.get("/signup/").content
    client.post("/signup/", {"email": "eve@example.org", "password1": "a long enough one"})
    assert not is_signed_in(client)


def test_changing_the_password_asks_for_the_old_one(client):
    user = make_user()
    sign_in(client, user.email)
    form = {"password1": "a brand new one", "password2": "a brand new one"}
    client.post("/password/change/", {"oldpassword": "wrong", **form})
    user.refresh_from_db()
    assert user.check_password(PASSWORD)
    client.post("/password/change/", {"oldpassword": PASSWORD, **form})
    user.refresh_from_db()
    assert user.check_password("a brand new one")
    assert is_signed_in(client)


def test_pages_of_an_account_are_their_owners_and_in_our_style(client):
    pages = {
        *("/email/", "/password/change/", "/2fa/", "/2fa/totp/activate/"),
        *("/2fa/webauthn/add/", "/sessions/", "/3rdparty/"),
    }
    for path in pages:
        assert client.get(path).headers["Location"].startswith("/login/?next="), path
    sign_in(client, make_user().email)
    assert client.get("/2fa/totp/activate/").headers["Location"].startswith("/reauthenticate/")
    client.post("/reauthenticate/", {"password": PASSWORD})
    for path in pages:
        page = client.get(path)
        assert page.status_code == 200, path
        assert b'aria-label="Account"' in page.content
        assert b"style=" not in page.content  # the content security policy would drop it
