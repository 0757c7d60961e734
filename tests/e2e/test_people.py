"""People in a real browser: an invitation from its form to the new member's console, and the pages of an account."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.factories import PASSWORD, Cast, make_user

LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


def sound(page: Any) -> None:
    """Nothing that axe knows to be a barrier, and nothing that sticks out of a narrow screen."""
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_invitation_from_form_to_console(visit: Callable[..., Any], cast: Cast):
    owner = visit()
    owner.sign_in(cast.owner.email)
    page = owner.page
    page.get_by_role("link", name="Members").click()
    invited = f"guest-of-{cast.tenant.slug}@example.org"
    page.get_by_label("E-mail address").fill(invited)
    page.get_by_label("Role", exact=True).select_option("viewer")
    page.get_by_role("button", name="Invite").click()
    link = page.get_by_label(f"Link for {invited}").inner_text()
    sound(page)

    guest = visit(width=390)
    guest.page.goto(link)
    sound(guest.page)
    guest.shoot("invitation")
    guest.page.get_by_label("Password").fill("a long enough one")
    guest.page.get_by_role("button", name="Make my account and join").click()
    guest.page.wait_for_url(re.compile(r"/t/"))
    guest.page.goto(page.url.removeprefix(owner.site.url))
    expect(guest.page.get_by_text(invited).first).to_be_attached()
    expect(guest.page.get_by_role("button", name="Invite")).to_have_count(0)

    page.reload()
    page.get_by_label(f"Role of {invited}", exact=True).select_option("developer")
    page.get_by_role("button", name=f"Set the role of {invited}").click()
    expect(page.get_by_text("is developer from now on")).to_be_visible()
    page.get_by_role("link", name=f"Remove {invited}").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_text("is no longer a member")).to_be_visible()
    guest.page.reload()
    expect(guest.page.get_by_text("Nothing here")).to_be_visible()
    guest.complaints.clear()  # the browser's console mentions that 404


def test_pages_of_people_in_every_look(visit: Callable[..., Any], cast: Cast):
    for width, scheme in LOOKS:
        visitor = visit(width=width, scheme=scheme)
        visitor.page.goto("/login/")
        sound(visitor.page)
        visitor.shoot(f"login-{width}-{scheme}")
        visitor.sign_in(cast.owner.email)
        visitor.page.goto("/reauthenticate/?next=/2fa/totp/activate/")
        visitor.page.get_by_label("Password").fill(PASSWORD)
        visitor.page.locator("main").get_by_role("button").first.click()
        visitor.page.wait_for_url("**/2fa/totp/activate/")
        pages = {
            "members": f"/t/{cast.tenant.public_id}/members/",
            "second-factor": "/2fa/totp/activate/",
            "mfa": "/2fa/",
            "sessions": "/sessions/",
            "password": "/password/change/",
            "email": "/email/",
        }
        for name, path in pages.items():
            visitor.page.goto(path)
            sound(visitor.page)
            visitor.shoot(f"{name}-{width}-{scheme}", full_page=True)


def test_a_security_key_is_a_second_factor(visit: Callable[..., Any], site: Any, cast: Cast):
    """With the browser's own virtual authenticator: registered, then asked for at the next sign-in."""
    person = site.do(make_user)
    visitor = visit()
    page = visitor.page
    devtools = page.context.new_cdp_session(page)
    devtools.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2",
        "transport": "internal",
        "hasResidentKey": True,
        "hasUserVerification": True,
        "isUserVerified": True,
    }
    devtools.send("WebAuthn.addVirtualAuthenticator", {"options": options})
    page.goto("/login/?next=/2fa/webauthn/add/")
    page.get_by_label("E-mail address").fill(person.email)
    page.get_by_label("Password").fill(PASSWORD)
    page.locator("main").get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/reauthenticate/**")
    page.get_by_label("Password").fill(PASSWORD)
    page.locator("main").get_by_role("button").first.click()
    page.wait_for_url("**/2fa/webauthn/add/")
    page.get_by_role("button", name="Add").click()
    page.wait_for_url(re.compile(r"/2fa/(webauthn/|recovery-codes/)$"))
    page.goto("/2fa/")
    page.get_by_role("button", name="Sign out").first.click()
    page.goto("/login/?next=/sessions/")
    page.get_by_label("E-mail address").fill(person.email)
    page.get_by_label("Password").fill(PASSWORD)
    page.locator("main").get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/2fa/authenticate/")
    page.get_by_role("button", name="Use a security key").click()
    page.wait_for_url("**/sessions/")
    expect(page.get_by_text("this one")).to_be_visible()
