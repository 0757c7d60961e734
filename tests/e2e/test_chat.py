"""The chat in a real browser, over the real gateway, queue and worker; only the model is scripted."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import Page, expect

from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.principal import LimitMetric
from tests.e2e.conftest import Visitor
from tests.e2e.site import MODEL, Site, wait_until
from tests.factories import Cast, set_limit


@pytest.fixture
def visitor(visit: Callable[..., Visitor], cast: Cast) -> Visitor:
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    visitor.page.get_by_role("link", name="Chat", exact=True).click()
    visitor.page.locator('#connection[data-state="open"]').wait_for()
    return visitor


def ask(page: Page, text: str, max_tokens: int) -> None:
    settings = page.get_by_role("button", name="Settings")
    settings.click()
    page.get_by_label("Longest answer").fill(str(max_tokens))
    page.get_by_label("Seed").fill("7")
    settings.click()
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answer_of(page: Page) -> str:
    return page.locator(".turn.assistant [data-text]").last.text_content() or ""


def grown_to(page: Page, length: int) -> None:
    expect(page.locator(".turn.assistant [data-text]").last).to_have_text(re.compile(rf"^\w{{{length},}}$"))


def finished(page: Page) -> None:
    expect(page.locator(".turn.assistant").last).to_have_attribute("aria-busy", "false", timeout=30_000)


def test_an_answer_streams_and_is_in_the_ledger(visitor: Visitor, site: Site, cast: Cast):
    page = visitor.page
    ask(page, "Say something", 60)
    grown_to(page, 5)
    assert len(answer_of(page)) < 60, "it came at once instead of bit by bit"
    finished(page)
    assert len(answer_of(page)) == 60
    expect(
        page.get_by_text(re.compile(r"^\d+ tokens/s · first token after \d+ ms · 60 tokens"))
    ).to_be_visible()
    visitor.shoot("chat-live")

    def recorded() -> bool:
        drain_usage_stream()
        return UsageRecord.objects.filter(tenant=cast.tenant, completion_tokens=60).exists()

    wait_until(lambda: site.do(recorded), "the ledger's row", site.log)


def test_stop_ends_it_at_the_worker_too(visitor: Visitor):
    page = visitor.page
    ask(page, "Go on for long", 4000)
    grown_to(page, 20)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text(re.compile(r"\d+ tokens · stopped"))).to_be_visible()
    assert 20 <= len(answer_of(page)) < 4000
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_an_answer_survives_a_reload_and_a_crash_of_the_gateway(visitor: Visitor, site: Site):
    page = visitor.page
    ask(page, "The same question", 40)
    finished(page)
    undisturbed = answer_of(page)
    page.get_by_role("button", name="New chat").click()

    ask(page, "The same question", 240)
    grown_to(page, 20)
    page.reload()
    grown_to(page, 60)
    site.kill_gateway()
    expect(page.get_by_text("The connection was lost; the answer goes on")).to_be_visible()
    visitor.shoot("chat-gateway-down")
    site.start_gateway()
    finished(page)
    whole = answer_of(page)
    assert len(whole) == 240
    assert whole.startswith(undisturbed)
    # The browser logs each refused connection while the gateway was down: those are expected here.
    visitor.complaints[:] = [text for text in visitor.complaints if "ERR_CONNECTION_REFUSED" not in text]


def test_an_idle_chat_stays_connected(visitor: Visitor):
    page = visitor.page
    states: list[str] = []
    page.expose_function("sawState", lambda state: states.append(state))
    page.evaluate(
        """() => new MutationObserver(() => sawState(document.getElementById("connection").dataset.state))
             .observe(document.getElementById("connection"), { attributes: true })"""
    )
    page.wait_for_timeout(8000)  # longer than the channel layer's wait, which once cut idle connections
    assert states == []


def test_a_hit_limit_says_which_and_when(visitor: Visitor, site: Site, cast: Cast):
    page = visitor.page
    site.do(lambda: set_limit(cast.tenant, LimitMetric.REQUESTS, 1))
    ask(page, "One", 5)
    finished(page)
    page.get_by_label("Your message").fill("Two")
    page.keyboard.press("Enter")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(re.compile(r"1 request per minute.*fits in \d"))
    expect(page.get_by_role("button", name="Retry in")).to_be_disabled()
    visitor.shoot("chat-limit-live")


def test_a_fresh_key_works_and_a_revoked_one_does_not(visit: Callable[..., Visitor], site: Site, cast: Cast):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    page.get_by_role("link", name="API keys").click()
    page.get_by_label("Name", exact=True).fill("e2e")
    page.get_by_role("button", name="Create key").click()
    secret = page.get_by_label("The new key").inner_text()

    def call() -> httpx.Response:
        return httpx.post(
            f"{site.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]},
            timeout=30,
        )

    answer = call()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    page.get_by_role("link", name="Revoke e2e").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke key").click()
    expect(page.get_by_text("is revoked. Requests")).to_be_visible()
    wait_until(lambda: call().status_code == 401, "the key to be refused", site.log, timeout_s=5)
