"""What people do from one end to the other: a key into a terminal, a report into a spreadsheet, a worker lost."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from inference.services.exports import write_exports
from tests.e2e.conftest import Visitor
from tests.e2e.site import MODEL, Site, wait_until
from tests.e2e.test_chat import answer_of, ask, finished, grown_to
from tests.e2e.world import busy_tenant
from tests.factories import Cast
from tests.pages import OWNER, PAGES, path_of


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_a_key_from_the_console_into_curl_until_it_is_revoked(
    visit: Callable[..., Visitor], site: Site, cast: Cast
):
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    command = page.get_by_label("curl command", exact=True).inner_text()
    page.get_by_role("link", name="API keys").click()
    page.get_by_label("Name", exact=True).fill("terminal")
    page.get_by_role("button", name="Create key").click()
    secret = page.get_by_label("The new key").inner_text()

    def paste() -> str:
        short = command.replace('"stream": true,', '"stream": true, "max_tokens": 8,')
        done = subprocess.run(
            ["bash", "-c", short],  # noqa: S607
            capture_output=True, text=True, check=True, timeout=60,
            env={"PATH": os.environ["PATH"], "HOME": "/", "WEIR_API_KEY": secret},
        )  # fmt: skip
        return done.stdout

    assert paste().rstrip().endswith("data: [DONE]")
    page.get_by_role("link", name="Revoke terminal").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke key").click()
    expect(page.get_by_text("is revoked. Requests")).to_be_visible()
    wait_until(lambda: '"error"' in paste(), "the key to be refused", site.log, timeout_s=30)


@pytest.mark.parametrize("form", ["csv", "xlsx"])
def test_a_report_becomes_a_file(visit: Callable[..., Visitor], site: Site, cast: Cast, form: str):
    base = site.do(lambda: busy_tenant(cast))
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    page.goto(f"{base}usage/")
    page.get_by_role("link", name="Export", exact=True).click()
    expect(page.get_by_text("No exports yet")).to_be_visible()
    page.get_by_label("Format").select_option(form)
    page.get_by_role("button", name="Write the file").click()
    expect(page.get_by_text("It is being written")).to_be_visible()
    site.do(write_exports)
    with page.expect_download() as started:
        page.get_by_role("link", name=re.compile(rf"\.{form}$")).click()
    content = Path(started.value.path()).read_bytes()
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
        assert sum(int(row["requests"]) for row in rows) == 40
        assert "support bot, production" in {row["key_name"] for row in rows}
    else:
        with zipfile.ZipFile(io.BytesIO(content)) as book:
            assert b"support bot, production" in book.read("xl/worksheets/sheet1.xml")


@pytest.mark.timeout(300)
def test_a_worker_is_killed_and_the_chat_goes_on(visit: Callable[..., Visitor], site: Site, cast: Cast):
    chat, operator = visit(), visit()
    operator.sign_in_operator(cast.operator.email, "/admin/live/")
    workers = operator.page.get_by_role("region", name="Workers, scrollable")
    expect(workers).to_contain_text(MODEL)
    chat.sign_in(cast.owner.email)
    page = chat.page
    page.get_by_role("link", name="Chat", exact=True).click()
    page.locator('#connection[data-state="open"]').wait_for()
    ask(page, "The same question", 40)
    finished(page)
    undisturbed = answer_of(page)
    page.get_by_role("button", name="New chat").click()
    ask(page, "The same question", 240)
    grown_to(page, 20)
    before = workers.inner_text()
    site.crash_worker()
    try:
        chat.shoot("chat-worker-killed")
    finally:
        site.start_worker()
    expect(page.locator(".turn.assistant").last).to_have_attribute("aria-busy", "false", timeout=120_000)
    whole = answer_of(page)
    assert len(whole) == 240, "a token was lost or came twice"
    assert whole.startswith(undisturbed)
    expect(workers).not_to_have_text(before, timeout=60_000)
    operator.shoot("live-worker-killed")
    site.wait_for_worker()  # the dead one is forgotten: the next test finds one


def test_another_tenants_addresses_lead_nowhere(
    visit: Callable[..., Visitor], cast: Cast, ids: dict[str, Any]
):
    visitor = visit()
    visitor.sign_in(cast.outsider.email)
    asked = [
        path_of(name, ids) for name, who in PAGES.items() if who == OWNER and "/t/" in path_of(name, ids)
    ]
    assert len(asked) > 15
    for path in asked:
        answer = visitor.page.request.get(path)
        assert answer.status == 404, path
        assert cast.tenant.name not in answer.text(), path
    visitor.page.goto(asked[0])
    expect(visitor.page.get_by_text("Nothing here")).to_be_visible()
    visitor.complaints.clear()  # the browser's console mentions that 404


def test_a_hidden_tab_costs_nothing(visit: Callable[..., Visitor], cast: Cast):
    """Told that it is hidden, the page closes its live socket; seen again, it opens one."""
    visitor = visit()
    visitor.sign_in(cast.owner.email)
    page = visitor.page
    expect(page.locator("#live-state")).to_have_text("Live")
    with page.expect_websocket() as opened:
        page.reload()
    live = opened.value
    expect(page.locator("#live-state")).to_have_text("Live")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("websocket", lambda socket: requests.append(socket.url))
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with live.expect_event("close"):
        page.evaluate(hide, True)
    page.wait_for_timeout(3000)  # longer than the live figures' interval
    assert requests == []
    with page.expect_websocket():
        page.evaluate(hide, False)
    expect(page.locator("#live-state")).to_have_text("Live")
