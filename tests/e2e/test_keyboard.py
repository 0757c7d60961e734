"""The console by its keys alone: what is done daily is reached, done and seen to be reached without a mouse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.conftest import Visitor
from tests.e2e.test_chat import answer_of, grown_to
from tests.factories import Cast
from tests.pages import OWNER, PAGES, path_of

_TABS_MAX = 80

UNSEEN = """() => {
    const shown = (element) => {
        const style = getComputedStyle(element);
        const ring = element.matches(".composer") ? style.boxShadow : style.outlineStyle;
        return ring !== "none";
    };
    const opaque = (element) =>
        !element || (Number(getComputedStyle(element).opacity) > 0.4 && opaque(element.parentElement));
    const reached = 'a[href], button, input:not([type="hidden"]), select, textarea, summary, [tabindex="0"]';
    return [...document.querySelectorAll(reached)]
        .filter((element) => element.checkVisibility() && !element.disabled)
        .filter((element) => {
            element.focus();
            if (document.activeElement !== element) return false;
            const around = element.closest("label, .composer");
            return !(shown(element) && opaque(element)) && !(around && shown(around) && opaque(around));
        })
        .map((element) => element.outerHTML.slice(0, 120));
}"""
"""What can have the focus without showing that it has it."""


def tab_to(page: Page, role: Any, name: str | re.Pattern[str]) -> None:
    wanted = page.get_by_role(role, name=name).locator("visible=true").first
    wanted.wait_for()
    for _ in range(_TABS_MAX):
        if wanted.evaluate("(element) => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"no Tab leads to {name}")


def press(page: Page, role: Any, name: str | re.Pattern[str]) -> None:
    tab_to(page, role, name)
    page.keyboard.press("Enter")


@pytest.mark.timeout(300)
def test_what_has_the_focus_shows_it(visit: Callable[..., Visitor], cast: Cast, ids: dict[str, Any]):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    for name in (name for name, whose in PAGES.items() if whose == OWNER):
        page.goto(path_of(name, ids))
        page.keyboard.press("Tab")  # from here on the browser takes every focus for one by keyboard
        assert page.evaluate(UNSEEN) == [], name


@pytest.fixture
def page(visit: Callable[..., Visitor], cast: Cast) -> Page:
    """The owner's, who may read the clipboard."""
    visitor = visit()
    visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.sign_in(cast.owner.email)
    return visitor.page


def test_a_chat_is_asked_stopped_and_copied(page: Page):
    press(page, "link", "Chat")
    page.locator('#connection[data-state="open"]').wait_for()
    tab_to(page, "textbox", "Your message")
    page.keyboard.type("Go on for long")
    page.keyboard.press("Enter")
    grown_to(page, 20)
    press(page, "button", "Stop the answer")
    expect(page.get_by_text(re.compile(r"\d+ tokens .*stopped"))).to_be_visible()
    expect(page.locator("#announcer")).to_have_text("The answer is stopped")
    expect(page.get_by_label("Your message")).to_be_focused()
    press(page, "button", "Copy")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == answer_of(page)


def test_a_key_is_made_copied_and_revoked(page: Page):
    press(page, "link", "API keys")
    expect(page.get_by_role("heading", name="API keys")).to_be_visible()
    tab_to(page, "textbox", "Name")
    page.keyboard.type("robot")
    press(page, "button", "Create key")
    expect(page.get_by_role("heading", name="is ready")).to_be_focused()
    press(page, "button", "Copy key")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("wr_live_")
    press(page, "link", "Revoke robot")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    press(page, "link", "Revoke robot")
    press(page, "button", "Revoke key")
    expect(page.get_by_text("is revoked. Requests with it are refused")).to_be_visible()
