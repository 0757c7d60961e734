"""A browser and a running site. Without Chromium these tests are skipped, and the summary says so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections
from django.test.utils import setup_databases, teardown_databases
from playwright.sync_api import Browser, Page, sync_playwright

from inference.models import Announcement, ModelSetting
from tests.e2e.site import ROOT, Site, running_site
from tests.e2e.world import a_world
from tests.factories import PASSWORD, Cast, make_cast

CHROMIUM = os.environ.get("WEIR_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARTIFACTS = ROOT / "test-artifacts"
_NO_CHROMIUM = "no Chromium on PATH (Debian: apt install chromium; or name one in WEIR_CHROMIUM)"
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.e2e)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=_NO_CHROMIUM))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if CHROMIUM is None:
        terminalreporter.write_line(f"browser tests skipped: {_NO_CHROMIUM}")


@pytest.fixture(autouse=True)
def _fast_passwords() -> None:
    """Real hashing here: the server that checks the passwords is another process."""


@pytest.fixture(scope="session")
def _committed_database(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The test database, written for real: another process reads it. pytest-django makes one only for tests that
    roll back."""
    with django_db_blocker.unblock():
        if connection.settings_dict["NAME"].startswith("test_"):
            yield
            return
        config = setup_databases(verbosity=0, interactive=False, aliases={"default"})
        yield
        teardown_databases(config, verbosity=0)


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays(_committed_database: None, django_db_blocker: Any) -> Iterator[None]:
    """The next module on this database may look at whole tables. Before the browser, to end after it."""
    yield
    with django_db_blocker.unblock():
        call_command("flush", verbosity=0, interactive=False)
        connections.close_all()


@pytest.fixture(scope="session")
def site(_committed_database: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    scratch = tmp_path_factory.mktemp("site")
    collected = {"WEIR_STATIC_ROOT": str(scratch / "static")}  # as `weir up` and the image have it
    subprocess.run(
        [sys.executable, "manage.py", "collectstatic", "--no-input", "--verbosity=0"],
        cwd=ROOT, env=os.environ | collected, check=True, timeout=300,
    )  # fmt: skip
    with running_site(connection.settings_dict, scratch, more_env=collected) as site:
        yield site


@pytest.fixture
def cast(site: Site) -> Cast:
    return site.do(make_cast)


@pytest.fixture
def ids(site: Site, cast: Cast) -> Iterator[dict[str, Any]]:
    yield site.do(lambda: a_world(cast))
    # What the operator decides, every page of every test would show.
    site.do(lambda: [model.objects.all().delete() for model in (ModelSetting, Announcement)])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Per module: Playwright's event loop lives in this thread and must be gone before an async test runs.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        yield browser
        browser.close()


@dataclass
class Visitor:
    """A page in a browser context of its own, and what went wrong in it."""

    page: Page
    site: Site
    complaints: list[str]

    def sign_in(self, email: str) -> None:
        self.page.goto("/login/")
        self.page.get_by_label("E-mail address").fill(email)
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.locator("main").get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(re.compile(r"/t/"))

    def sign_in_operator(self, email: str, path: str) -> None:
        self.page.goto(f"/login/?next={path}")
        self.page.get_by_label("E-mail address").fill(email)
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.locator("main").get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"**{path}")

    def shoot(self, name: str, *, full_page: bool = False) -> None:
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=full_page, animations="disabled")


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Callable[..., Visitor]]:
    """Opens fresh visitors; afterwards none of them may have seen an error in the browser's console."""
    visitors: list[Visitor] = []

    def open_visitor(width: int = 1280, height: int = 800, scheme: str = "light") -> Visitor:
        context = browser.new_context(
            base_url=site.url, viewport={"width": width, "height": height}, color_scheme=scheme,
            locale="en-GB", timezone_id="Europe/Berlin",
        )  # fmt: skip
        context.set_default_timeout(20_000)
        page = context.new_page()
        visitor = Visitor(page, site, [])
        page.on("pageerror", lambda error: visitor.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                visitor.complaints.append(f"{message.text} {message.location}")
                if message.type == "error"
                else None
            ),
        )
        visitors.append(visitor)
        return visitor

    yield open_visitor
    for visitor in visitors:
        visitor.page.context.close()
    complaints = [text for visitor in visitors for text in visitor.complaints]
    assert not complaints
