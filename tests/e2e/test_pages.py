"""Every page in light, dark and on a phone: it fits, it can be read, it works without a mouse."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.utils import timezone
from playwright.sync_api import WebSocketRoute, expect

from inference.models import UsageRecord
from inference.services.partitions import ensure_partitions
from tenants.principal import LimitMetric
from tests.e2e.conftest import Visitor
from tests.e2e.site import MODEL, Site
from tests.factories import PASSWORD, Cast, make_key, make_tenant, set_limit

SCREENS = {"light": (1280, 800, "light"), "dark": (1280, 800, "dark"), "phone": (390, 780, "dark")}

WEIGHT = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce((sum, entry) => sum + entry.decodedBodySize, 0)"""
"""All that the page made the browser load, in bytes, uncompressed, from its cache or not."""


def busy_tenant(cast: Cast) -> str:
    """A tenant with keys, limits and a week of requests."""
    make_tenant(f"Ministry of Long Names and Procurement, {cast.tenant.name}", owner=cast.owner)
    keys = [make_key(cast.tenant, name=name).api_key for name in ("support bot, production", "notebook")]
    for metric, amount in (
        (LimitMetric.REQUESTS, 600),
        (LimitMetric.TOKENS, 400_000),
        (LimitMetric.CONCURRENCY, 64),
    ):
        set_limit(cast.tenant, metric, amount)
    now = timezone.now()
    for number in range(40):
        finished = now - timedelta(hours=4 * number)
        created = finished - timedelta(milliseconds=900 + 211 * number)
        ensure_partitions([created.date()])
        UsageRecord.objects.create(
            tenant=cast.tenant,
            request_id=f"{cast.tenant.public_id}-{number}",
            key_public_id=None if number % 3 == 0 else keys[number % 2].public_id,
            model=MODEL,
            tier="standard",
            finish_reason=("stop", "stop", "length", "stop", "cancelled", "deadline", "error")[number % 7],
            error_code="engine_error" if number % 7 == 6 else "",
            prompt_tokens=37 * number + 12,
            completion_tokens=101 * number % 512,
            created_at=created,
            day=created.date(),
            first_token_at=finished - timedelta(milliseconds=700 + 200 * number),
            finished_at=finished,
        )
    return f"/t/{cast.tenant.public_id}/"


@pytest.mark.parametrize("screen", SCREENS)
def test_pages_fit_and_can_be_read(visit: Callable[..., Visitor], site: Site, cast: Cast, screen: str):
    base = site.do(lambda: busy_tenant(cast))
    key_id = site.do(lambda: make_key(cast.tenant).api_key.public_id)
    visitor = visit(*SCREENS[screen])
    page = visitor.page
    signed_out = {"start": "/", "sign-in": "/login/", "docs-public": "/docs"}
    signed_in = {
        "overview": base, "keys": f"{base}keys/", "usage": f"{base}usage/", "requests": f"{base}requests/",
        "request": f"{base}requests/{cast.tenant.public_id}-7/", "rotate": f"{base}keys/{key_id}/rotate/",
        "key": f"{base}keys/{key_id}/", "projects": f"{base}projects/", "limits": f"{base}limits/",
        "batches": f"{base}batches/", "alerts": f"{base}alerts/",
        "audit": f"{base}audit/", "settings": f"{base}settings/",
        "chat": f"{base}chat/", "docs": "/docs",
    }  # fmt: skip
    for name, path in (signed_out | signed_in).items():
        if name == "overview":
            visitor.sign_in(cast.owner.email)
        page.goto(path)
        expect(page.locator("h1")).to_have_count(1)
        if name == "usage":
            page.locator("#usage-chart canvas").wait_for()
        if name == "chat":
            page.locator('#connection[data-state="open"]').wait_for()
        visitor.shoot(f"{name}-{screen}", full_page=name != "chat")
        weight = page.evaluate(WEIGHT)
        assert 5_000 < weight < 300_000, f"{name} weighs {weight} bytes"
        width, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room, f"{name} is {width} px wide on a screen of {room}"
        violations = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})
        assert violations.violations_count == 0, f"{name}: {violations.generate_report()}"


def test_phone_menu_leads_to_every_page(visit: Callable[..., Visitor], site: Site, cast: Cast):
    visitor = visit(*SCREENS["phone"])
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    page.get_by_role("button", name="Menu").click()
    visitor.shoot("menu-phone")
    page.get_by_role("navigation", name="Console").get_by_role("link", name="Usage").click()
    expect(page.get_by_role("heading", name="Usage", exact=True)).to_be_visible()
    expect(page.get_by_text("Nothing was used")).to_be_visible()
    visitor.shoot("usage-empty-phone")
    page.get_by_role("button", name="Menu").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation", name="Console")).to_be_hidden()


def test_a_chosen_theme_holds_on_the_next_page(visit: Callable[..., Visitor], cast: Cast):
    visitor = visit(scheme="light")
    page = visitor.page
    visitor.sign_in(cast.owner.email)
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("radio", name="Dark").check()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    expect(page.get_by_role("radio", name="Dark")).to_be_checked()
    page.get_by_role("radio", name="Auto").check()
    assert page.evaluate(background) == light


def test_the_first_tab_skips_to_the_content(visit: Callable[..., Visitor], cast: Cast):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


def test_times_are_in_the_readers_zone(visit: Callable[..., Visitor], site: Site, cast: Cast):
    base = site.do(lambda: busy_tenant(cast))
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    visitor.page.goto(base)
    first = visitor.page.locator("time").first
    expect(first).to_have_attribute("data-localised", "")
    assert "CET" in (first.get_attribute("title") or "")


def test_key_made_shown_once_copied_and_revoked(visit: Callable[..., Visitor], site: Site, cast: Cast):
    visitor = visit()
    visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    page.get_by_role("link", name="API keys").click()
    expect(page.get_by_text("No keys yet")).to_be_visible()
    visitor.shoot("keys-empty")
    page.get_by_role("textbox", name="Name", exact=True).fill("ci <b>runner</b>")
    page.keyboard.press("Enter")
    secret = page.get_by_label("The new key").inner_text()
    assert secret.startswith("wr_live_")
    expect(page.get_by_role("heading", name="is ready")).to_be_focused()
    visitor.shoot("key-made")
    page.get_by_role("button", name="Copy key").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == secret
    page.reload()
    assert secret not in page.content()
    page.get_by_role("link", name="Revoke ci").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    visitor.shoot("key-revoke")
    dialog.get_by_role("link", name="Keep it").click()
    expect(dialog).to_be_hidden()
    page.get_by_role("link", name="Revoke ci").click()
    dialog.get_by_role("button", name="Revoke key").click()
    expect(page.get_by_text("is revoked. Requests with it are refused")).to_be_visible()
    expect(page.get_by_role("link", name="Revoke ci")).to_have_count(0)


def test_gauges_refresh_while_they_are_seen(visit: Callable[..., Visitor], site: Site, cast: Cast):
    site.do(lambda: set_limit(cast.tenant, LimitMetric.REQUESTS, 50))
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    expect(page.get_by_text("50 of 50")).to_be_visible()
    site.do(lambda: set_limit(cast.tenant, LimitMetric.REQUESTS, 70))
    expect(page.get_by_text("of 70")).to_be_visible(timeout=20_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_operators_live_page_is_fresh_and_says_when_it_is_not(
    visit: Callable[..., Visitor], site: Site, cast: Cast, scheme: str
):
    visitor = visit(scheme=scheme)
    page = visitor.page
    is_cut, sockets = False, []

    def connect(socket: WebSocketRoute) -> None:
        if is_cut:
            socket.close()
            return
        socket.connect_to_server()
        sockets.append(socket)

    page.route_web_socket("**/ws/live?*", connect)
    page.goto("/login/?next=/admin/live/")
    page.get_by_label("E-mail address").fill(cast.operator.email)
    page.get_by_label("Password").fill(PASSWORD)
    page.locator("main").get_by_role("button", name="Sign in").click()
    workers = page.get_by_role("region", name="Workers, scrollable")
    expect(workers).to_contain_text(MODEL)
    visitor.shoot(f"live-{scheme}")
    violations = Axe().run(page, context=".live", options={"runOnly": ["wcag2a", "wcag2aa", "wcag22aa"]})
    assert violations.violations_count == 0, violations.generate_report()
    is_cut = True
    sockets[-1].close()
    expect(page.get_by_text("The connection is lost: these figures are old")).to_be_visible()
    is_cut = False
    expect(page.locator("#live-state")).to_have_text("Live")
