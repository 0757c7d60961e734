"""The pages that anybody may see, and what every page owes its reader."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from django.conf import settings
from django.template.loader import render_to_string
from django.test import Client
from django.urls import reverse

from tests.factories import make_operator
from tests.pages import ELSEWHERE, NO_PAGES, PAGES, routes

KNOWN = {**dict.fromkeys(PAGES, "a page"), **ELSEWHERE, **NO_PAGES}
PUBLIC = ["/", "/docs/", "/login/"]
TEMPLATES = Path(settings.BASE_DIR) / "templates"


def test_every_route_is_known_as_a_page_or_as_none():
    """A new page gets its line in tests/pages.py, and with it a look in light, dark and on a phone."""
    assert set(routes()) == set(KNOWN)
    assert len(KNOWN) == len(PAGES) + len(ELSEWHERE) + len(NO_PAGES)


@pytest.mark.django_db
def test_what_is_said_to_answer_post_alone_does():
    browser = Client()
    browser.force_login(make_operator())
    for name in (name for name, why in NO_PAGES.items() if why.startswith("answers POST")):
        wanted = routes()[name].pattern.converters
        path = reverse(name, kwargs=dict.fromkeys(wanted, "01890000-0000-7000-8000-000000000000"))
        assert browser.get(path).status_code in (404, 405), name


@pytest.mark.django_db
@pytest.mark.parametrize("path", PUBLIC)
def test_public_pages_need_no_account(client: Client, path: str):
    response = client.get(path)
    assert response.status_code == 200
    assert b"</html>" in response.content


@pytest.mark.django_db
@pytest.mark.parametrize("path", PUBLIC)
def test_policy_allows_no_inline_script_or_style(client: Client, path: str):
    policy = client.get(path).headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "style-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.django_db
def test_pages_are_sent_compressed_and_never_twice_in_the_same_length(client: Client):
    """BREACH: what repeats in a page would show in how long it is."""
    plain = client.get("/docs/")
    answers = [client.get("/docs/", headers={"accept-encoding": "gzip"}) for _ in range(8)]
    assert len({len(answer.content) for answer in answers}) > 1
    assert len(answers[0].content) < len(plain.content) / 2
    assert gzip.decompress(answers[0].content)[:200] == plain.content[:200]
    assert "Accept-Encoding" in answers[0].headers["Vary"]
    assert "Content-Encoding" not in plain.headers
    assert "Content-Encoding" not in client.get("/healthz", headers={"accept-encoding": "gzip"}).headers


@pytest.mark.django_db
def test_admin_gets_what_its_theme_needs(client: Client):
    policy = client.get("/admin/login/").headers["Content-Security-Policy"].split("; ")
    assert "script-src 'self' 'unsafe-eval'" in policy
    assert "style-src 'self' 'unsafe-inline'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("template", sorted(TEMPLATES.rglob("*.html")), ids=lambda path: path.name)
def test_templates_hold_no_inline_code(template: Path):
    source = template.read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|\shx-on|<script(?![^>]*\ssrc=)", source)


@pytest.mark.parametrize("name", ["400", "403", "403_csrf", "404", "409", "500", "503"])
def test_error_pages_render_without_a_request(name: str):
    page = render_to_string(f"{name}.html")
    assert name[:3] in page
    assert "Weir" in page


@pytest.mark.django_db
def test_unknown_path_answers_in_the_house_style(client: Client):
    response = client.get("/no/such/page")
    assert response.status_code == 404
    assert b"not yours to see" in response.content
