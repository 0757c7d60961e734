"""What can't be taken back asks first, in one way: a dialog that says what it does, or a page without JavaScript."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import Visitor
from tests.e2e.test_pages import in_every_look
from tests.factories import Cast
from tests.pages import path_of

QUESTIONS = [
    (
        "service_accounts",
        "Retire nightly evaluation",
        "Retire and revoke its keys",
        "and its keys are revoked",
    ),
    ("members", "Revoke the invitation", "Revoke invitation", "is not invited any more"),
    ("members", "Remove ", "Remove", "is no longer a member"),
    ("batches", "Cancel batch_", "Cancel the batch", "It is being cancelled"),
    ("projects", "Delete ", "Delete project", "is deleted"),
    ("webhook", "Delete", "Delete webhook", "The webhook is deleted"),
    ("keys", "Revoke ci runner", "Revoke key", "is revoked"),
]
"""Where, the link that asks, the button that does it, what is said afterwards."""


@pytest.mark.parametrize(("where", "link", "verb", "said"), QUESTIONS, ids=lambda value: value.strip())
def test_asks_first_and_keeps_by_default(
    visit: Callable[..., Visitor],
    cast: Cast,
    ids: dict[str, Any],
    where: str,
    link: str,
    verb: str,
    said: str,
):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    dialog = page.get_by_role("dialog")

    def ask() -> None:
        page.goto(path_of(where, ids))
        if where == "projects":
            page.get_by_role("link", name="Change An empty one").click()
        page.get_by_role("link", name=link).first.click()
        expect(dialog.get_by_role("heading")).to_contain_text("?")

    ask()
    expect(dialog.locator("[data-close-dialog]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    ask()
    visitor.shoot(f"question-{where}")
    dialog.get_by_role("button", name=verb, exact=True).click()
    expect(page.locator(".notice").filter(has_text=said)).to_be_visible()


def test_the_same_as_a_page(visit: Callable[..., Visitor], cast: Cast, ids: dict[str, Any]):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    for name in ("retire_service_account", "invitation_revoked"):
        visitor.page.goto(path_of(name, ids))
        in_every_look(visitor, f"question-{name}")
    visitor.page.get_by_role("link", name="Keep it").click()
    expect(visitor.page.get_by_role("heading", level=1)).to_have_text("Members")


def test_the_operator_is_asked_too(visit: Callable[..., Visitor], cast: Cast, ids: dict[str, Any]):
    visitor = visit()
    visitor.sign_in_operator(cast.operator.email, "/admin/live/")
    tenant = ids["tenant_id"]
    visitor.page.goto(f"/admin/live/dead-letter/?verb=drop&model=m&request_id=r1&tenant={tenant}")
    expect(visitor.page.get_by_role("button", name="Drop it")).to_be_visible()
    in_every_look(visitor, "question-dead-letter", context=".live")
    visitor.page.goto("/admin/live/unload/?worker=w1&model=m")
    expect(visitor.page.get_by_role("button", name="Unload it")).to_be_visible()
    in_every_look(visitor, "question-unload", context=".live")
    visitor.page.goto("/admin/live/load/?worker=w1")
    expect(visitor.page.get_by_label("What clients call it")).to_be_visible()
    in_every_look(visitor, "load-model", context=".live")
