"""Every page in light, dark and on a phone: it fits, it can be read, it works without a mouse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import unfold
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, WebSocketRoute, expect

from tenants.principal import LimitMetric
from tests.e2e.conftest import Visitor
from tests.e2e.site import MODEL, Site
from tests.e2e.world import busy_tenant
from tests.factories import PASSWORD, Cast, set_limit
from tests.inference.test_chat_socket import session_cookie
from tests.pages import NOBODY, OPERATOR, OWNER, PAGES, RECENT, admin_forms, admin_lists, path_of
from weir.operator_menu import operator_menu

WCAG = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]
SCREENS = {"light": (1280, 800, "light"), "dark": (1280, 800, "dark"), "phone": (390, 780, "dark")}

BETWEEN = (1024, 768, 360)
"""Widths of small windows, tablets and small phones, at which nothing may be hidden either."""

HIDDEN = """async () => {
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    return [...document.querySelectorAll(
        ".table-wrap, .code pre, .live-scroll, .chart, :not(td) > .code.one-line > code")]
    .filter((wrap) => wrap.scrollWidth > wrap.clientWidth + 1)
    .map((wrap) => wrap.getAttribute("aria-label") || wrap.textContent);
}"""
"""Tables whose last columns nobody sees without scrolling, programs whose lines' ends, names in a chart's legend."""

CUT_LIST = """() => [...document.querySelectorAll("#result_list")]
    .map((list) => list.closest(".simplebar-content-wrapper"))
    .some((wrap) => wrap && wrap.scrollWidth > wrap.clientWidth + 1)"""
"""Whether a list of the admin hides its last columns."""

CUT_IDS = """() => [...document.querySelectorAll("#result_list td.field-request_id")]
    .filter((cell) => cell.scrollWidth > cell.clientWidth + 1 || cell.scrollHeight > cell.clientHeight + 1)
    .map((cell) => cell.textContent.trim())"""
"""Ids of requests of which a list of the admin shows a part: they all begin alike."""

TORN = """() => [...document.querySelectorAll(".filters, .form-row, .page-head > .form-actions")]
    .filter((form) => new Set(
        [...form.children].map((each) => Math.round(each.getBoundingClientRect().bottom)).filter(Boolean)).size > 1)
    .map((form) => form.textContent.replace(/\\s+/g, " ").slice(-60))"""
"""Forms and buttons of one line that break into two."""

TORN_TEXT = """() => [...document.querySelectorAll("p")]
    .filter((text) => /grid|flex/.test(getComputedStyle(text).display) && text.children.length &&
        [...text.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && /\\w/.test(node.data)))
    .map((text) => text.textContent.replace(/\\s+/g, " "))"""
"""Sentences of which each link and each stretch of text is laid out by itself."""

WEIGHT = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce(([sent, unpacked], entry) => [sent + entry.encodedBodySize, unpacked + entry.decodedBodySize], [0, 0])"""
"""All that the page made the browser load, in bytes, from its cache or not: as it came, and uncompressed."""
WEIGHT_MAX = 300_000


def not_heavy(page: Page, name: str) -> int:
    """Of what a first visit to it sends; what it is uncompressed is returned."""
    sent, unpacked = page.evaluate(WEIGHT)
    assert 1_000 < sent < WEIGHT_MAX, f"{name} sends {sent} bytes"
    return int(unpacked)


def in_every_look(visitor: Visitor, name: str, *, context: str | None = None) -> None:
    """As it is, in light and dark and on a phone: nothing sticks out, and axe knows of no barrier."""
    page = visitor.page
    unpacked = not_heavy(page, name)
    if context is None:  # the operator's pages carry the admin theme's own styles and scripts
        assert unpacked < WEIGHT_MAX, f"{name} weighs {unpacked} bytes"
    for screen, (width, height, scheme) in SCREENS.items():
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        if context is not None:
            page.reload()  # the admin's theme looks at it once
        visitor.shoot(f"{name}-{screen}", full_page=name != "chat")
        wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= room, f"{name} is {wide} px wide on a screen of {room}"
        assert page.evaluate(HIDDEN) == [], f"{name} on {screen}"
        assert page.evaluate(TORN_TEXT) == [], f"{name} on {screen}"
        if screen != "phone":
            assert page.evaluate(TORN) == [], f"{name} on {screen}"
        found = Axe().run(page, context=context, options={"runOnly": WCAG})
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
    for width in BETWEEN:
        page.set_viewport_size({"width": width, "height": 780})
        wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= room, f"{name} is {wide} px wide on a screen of {room}"
        assert page.evaluate(HIDDEN) == [], f"{name} at {width} px"
    page.set_viewport_size({"width": 1280, "height": 800})


def ready(page: Page, name: str) -> None:
    """What a page fetches or draws by itself is there."""
    expect(page.locator("h1").first).to_be_attached()
    if name == "usage":
        page.locator("#usage-chart canvas").wait_for()
    if name == "chat":
        page.locator('#connection[data-state="open"]').wait_for()


@pytest.mark.parametrize("who", [NOBODY, OWNER, RECENT, OPERATOR])
@pytest.mark.timeout(600)
def test_pages_fit_and_can_be_read(visit: Callable[..., Visitor], cast: Cast, ids: dict[str, Any], who: str):
    visitor = visit()
    page = visitor.page
    if who in (OWNER, RECENT):
        visitor.sign_in(cast.owner.email)
    if who == RECENT:
        page.goto("/reauthenticate/?next=/2fa/")
        page.get_by_label("Password").fill(PASSWORD)
        page.locator("main").get_by_role("button").first.click()
        page.wait_for_url("**/2fa/")
    if who == OPERATOR:
        visitor.sign_in_operator(cast.operator.email, "/admin/live/")
    for name in (name for name, whose in PAGES.items() if whose == who):
        answer = page.goto(path_of(name, ids))
        assert answer is not None
        assert answer.ok, f"{name}: {answer.status}"
        assert page.url.split("?")[0].endswith(path_of(name, ids).split("?")[0]), f"{name} led to {page.url}"
        ready(page, name)
        if who != OPERATOR:
            expect(page.locator("h1")).to_have_count(1)
        in_every_look(visitor, name, context=".live" if who == OPERATOR else None)
    if who == OWNER:
        for by in ("key", "project", "model"):
            page.goto(f"{path_of('usage', ids)}?days=90&by={by}")
            ready(page, "usage")
            in_every_look(visitor, f"usage-by-{by}")
        page.goto(path_of("request", ids | {"request_id": ids["refused_id"]}))
        expect(page.get_by_role("heading", name="Refused request")).to_be_visible()
        in_every_look(visitor, "request-refused")


@pytest.mark.timeout(300)
def test_the_pages_of_a_new_tenant_fit(visit: Callable[..., Visitor], cast: Cast):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    for name in ("overview", "keys", "projects", "limits", "usage", "requests", "batches", "alerts"):
        visitor.page.goto(path_of(name, {"tenant_id": cast.tenant.public_id}))
        expect(visitor.page.locator("h1")).to_have_count(1)
        in_every_look(visitor, f"{name}-new")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ids")
def test_the_admins_lists_and_forms_fit(visit: Callable[..., Visitor], site: Site, cast: Cast):
    """Its theme's own pages: that they open, hold what we put into them, fit a screen, and axe knows of no barrier."""
    visitor = visit()
    page = visitor.page
    visitor.sign_in_operator(cast.operator.email, "/admin/live/")
    forms = site.do(lambda: admin_forms(cast.operator))
    for path in [*admin_lists(), *forms]:
        page.emulate_media(color_scheme="light")
        answer = page.goto(path)
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"
        name = re.sub(r"/\d+/", "/", path).strip("/").replace("/", "-")
        not_heavy(page, name)
        for screen, (width, height, scheme) in SCREENS.items():
            if path in forms and screen == "dark":
                continue  # as on the phone, and there are many
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            if screen != "light":
                page.reload()  # the theme looks at it once
            visitor.shoot(f"{name}-{screen}")
            wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide <= room, f"{name} is {wide} px wide on a screen of {room}"
            assert screen == "phone" or not page.evaluate(CUT_LIST), f"{name} hides columns"
            assert page.evaluate(CUT_IDS) == [], f"{name} on {screen}"
            found = Axe().run(page, options={"runOnly": WCAG})
            assert found.violations_count == 0, f"{name}, {screen}: {found.generate_report()}"
        page.set_viewport_size({"width": 1280, "height": 800})


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


def test_the_admins_first_page_is_in_the_viewers_zone_too(
    visit: Callable[..., Visitor], site: Site, cast: Cast
):
    """Who came by single sign-on has seen no page of ours before, which would have told the zone."""
    page = visit().page
    name, _, value = site.do(lambda: session_cookie(cast.operator)).partition("=")
    page.context.add_cookies([{"name": name, "value": value, "url": site.url}])
    page.goto("/admin/tenants/tenant/")
    expect(page.locator("#result_list")).to_contain_text(re.compile(r"\bCES?T\b"))


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
    visitor.sign_in_operator(cast.operator.email, "/admin/live/")
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


def test_the_admin_works_without_a_mouse(visit: Callable[..., Visitor], cast: Cast):
    """Its theme makes buttons of what no key reaches: the menu on a phone, filters, the way to sign out."""
    visitor = visit(*SCREENS["phone"])
    visitor.sign_in_operator(cast.operator.email, "/admin/live/")
    page = visitor.page
    tenants = page.get_by_role("link", name="Tenants: usage, limits")
    expect(tenants).to_be_hidden()
    press_when_reached(page, "Menu")
    expect(tenants).to_be_visible()
    visitor.shoot("admin-menu-phone")
    press_when_reached(page, cast.operator.email)
    page.get_by_role("button", name="Log out").wait_for()
    page.goto("/admin/tenants/tenant/")
    press_when_reached(page, "Filters")
    suspended = page.get_by_role("heading", name="suspended at")
    expect(suspended).to_be_visible()
    # It is drawn first and entered a frame later.
    expect(page.locator("#changelist-filter:focus-within")).to_be_visible()
    page.keyboard.press("Escape")
    expect(suspended).to_be_hidden()


def press_when_reached(page: Page, name: str) -> None:
    """With Tab and Enter alone."""
    button = page.get_by_role("button", name=name).locator("visible=true").first
    button.wait_for()
    for _ in range(80):
        if button.evaluate("(element) => element === document.activeElement"):
            page.keyboard.press("Enter")
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"no Tab leads to {name}")


def test_the_admins_symbols_are_symbols(visit: Callable[..., Visitor], cast: Cast):
    """Our font holds those alone that the theme and our menu name: one that it lacks would be written out as a word."""
    visitor = visit()
    visitor.sign_in_operator(cast.operator.email, "/admin/live/")
    names = sorted(symbols())
    widths = visitor.page.evaluate(SYMBOL_WIDTHS, names)
    assert {name: width for name, width in zip(names, widths, strict=True) if width != 18} == {}
    assert visitor.page.evaluate(SYMBOL_WIDTHS, ["no_such_symbol"]) != [18]


SYMBOL_WIDTHS = """async (names) => {
    await document.fonts.load('18px "Material Symbols Outlined"');
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.font = '18px "Material Symbols Outlined"';
    return names.map((name) => Math.round(canvas.measureText(name).width));
}"""


def symbols() -> set[str]:
    """By name, in the theme's templates, styles and code, and in our menu."""
    theme = Path(unfold.__file__).parent
    named = {item["icon"] for group in operator_menu() for item in group["items"]}
    for template in theme.glob("templates/**/*.html"):
        text = template.read_text()
        named |= set(re.findall(r"material-symbols-outlined[^>]*>\s*([a-z][a-z0-9_]+)\s*<", text))
        named |= set(re.findall(r"""\bicon=["']([a-z][a-z0-9_]+)["']""", text))
        for chosen in re.findall(r'material-symbols-outlined[^>]*>?\s*(?:<span)? x-text="([^"]+)"', text):
            named |= set(re.findall(r"(?:\?|:|&&|\|\|) '([a-z_]+)'", chosen))
    for code in theme.rglob("*.py"):
        named |= set(re.findall(r"""\bicon=["']([a-z][a-z0-9_]+)["']""", code.read_text()))
    styles = (theme / "static" / "unfold" / "css" / "styles.css").read_text()
    return named | set(re.findall(r'content:"([a-z][a-z_]+)"', styles))
