"""From an empty installation, by its pages alone, to a curl that answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import psycopg
import pytest
from axe_playwright_python.sync_playwright import Axe
from django.db import connection
from playwright.sync_api import Page, expect
from psycopg import sql

from tests.e2e.conftest import Visitor
from tests.e2e.site import MODEL, ROOT, Site, running_site

SECRET = "of the first run's own site"


@pytest.fixture(scope="module")
def site(_committed_database: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With a database of its own in which nobody was ever made, and a model that ends its answers by itself."""
    here = connection.settings_dict
    database = {**here, "NAME": f"{here['NAME']}_first_run"}
    name = sql.Identifier(database["NAME"])
    server = psycopg.connect(
        host=here["HOST"], port=here["PORT"] or None, user=here["USER"], password=here["PASSWORD"] or None,
        dbname="postgres", autocommit=True, connect_timeout=10,
    )  # fmt: skip
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name)
    with server, pytest.MonkeyPatch.context() as patch:
        server.execute(drop)
        server.execute(sql.SQL("CREATE DATABASE {}").format(name))
        patch.setenv("SCRIPTED_STOP_AFTER", "24")
        patch.setenv("WEIR_SECRET_KEY", SECRET)
        try:
            with running_site(database, tmp_path_factory.mktemp("first-run"), migrate=True) as site:
                yield site
        finally:
            server.execute(drop)


def manage(site: Site, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT, env=site.env, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def sound(page: Page) -> None:
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def in_every_look(visitor: Visitor, name: str) -> None:
    page = visitor.page
    for width, height, scheme in ((1280, 800, "dark"), (390, 780, "dark"), (1280, 800, "light")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour on its way to another
        sound(page)
        visitor.shoot(f"{name}-{width}-{scheme}", full_page=True)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
@pytest.mark.timeout(300)
def test_from_nothing_to_a_curl_that_answers(visit: Callable[..., Visitor], site: Site):
    visitor = visit()
    page = visitor.page
    page.goto("/")
    expect(page.get_by_role("heading", name="This installation is new")).to_be_visible()
    in_every_look(visitor, "setup-empty")

    link = manage(site, "setup_link")
    assert link.startswith(f"{site.url}/setup/")
    page.goto(link)
    in_every_look(visitor, "setup-operator")
    page.get_by_label("E-mail address").fill("ada@example.org")
    page.get_by_label("Password").fill("short")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("too short")
    page.get_by_label("Password").fill("a long enough one")
    page.keyboard.press("Enter")
    page.wait_for_url("**/setup/")
    in_every_look(visitor, "setup-steps")

    page.get_by_role("button", name="Ask it").click()
    expect(page.get_by_text("First token after")).to_be_visible(timeout=60_000)
    expect(page.get_by_text("24 tokens")).to_be_visible()
    in_every_look(visitor, "setup-asked")

    page.get_by_label("Name", exact=True).fill("Acme Research")
    page.get_by_role("button", name="Make the tenant").click()
    expect(page.get_by_text("Acme Research, in the tier standard")).to_be_visible()
    in_every_look(visitor, "setup-tenant")
    page.get_by_role("button", name="Make the key").click()
    expect(page.get_by_role("heading", name="Acme Research can call the API")).to_be_visible()
    in_every_look(visitor, "setup-done")

    command = page.get_by_label("curl command", exact=True).inner_text()
    assert MODEL in command
    answer = subprocess.run(
        ["bash", "-c", command],  # noqa: S607
        capture_output=True, text=True, check=True, timeout=60, env={"PATH": os.environ["PATH"], "HOME": "/"},
    )  # fmt: skip
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer.stdout + answer.stderr
    assert answer.stdout.count("data: ") > 5, "it came at once instead of bit by bit"

    page.get_by_role("link", name="To the console").click()
    expect(page.get_by_role("heading", name="Acme Research")).to_be_visible()
    stranger = visit()
    second = stranger.page
    second.goto(link)
    stranger.complaints.clear()  # the browser's console mentions that 410
    expect(second.get_by_role("heading", name="This link does not open anything")).to_be_visible()
    page.goto("/setup/")
    expect(page.get_by_role("heading", name="Acme Research")).to_be_visible()
