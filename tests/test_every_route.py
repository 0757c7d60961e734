"""Every route of the product outside /v1, found by itself: what opens to anybody, and what to operators alone.

Pages of a tenant have tables of their own in test_who_may_see_pages.py, /v1 in inference/api/test_who_may.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from uuid import uuid4

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, is_valid_path

from tests.factories import make_cast
from tests.test_who_may_see_pages import PAGES

OPEN = {
    "/": "what this is",
    "/3rdparty/login/cancelled/": "the way in, given up",
    "/confirm-email/": "the way in, with a mail's link",
    "/confirm-email/x/": "the way in, with a mail's link",
    "/docs/": "how to use it",
    "/docs/api/": "how to use it",
    "/healthz": "for load balancers",
    "/inactive/": "the way in, for who may not",
    "/login/": "the way in",
    "/password/reset/": "the way in, forgotten",
    "/password/reset/done/": "the way in, forgotten",
    "/password/reset/key/done/": "the way in, forgotten",
    "/readyz": "for load balancers",
    "/signup/": "says that people are invited",
    "/sso/": "the way in",
}
"""What answers anybody with a page, and what for. Whoever adds a route that does adds a row."""
NO_SLASH = (
    "/healthz", "/readyz", "/metrics",  # probes
    "/operator/",  # for programs, as /v1 is
    ".csv", ".pdf", ".json", ".md", "/batches/files/x",  # files
)  # fmt: skip
"""What programs ask for begins so, and what files are ends so: without a slash, which a page's address ends with."""
_DUMMIES = {"uuid": str(uuid4()), "int": "1"}


def paths(patterns: list[URLPattern | URLResolver], before: str = "/") -> Iterator[str]:
    """A path for every route."""
    for each in patterns:
        path = before + _path(str(each.pattern))
        if isinstance(each, URLResolver):
            yield from paths(each.url_patterns, path)
        else:
            yield path


def _path(pattern: str) -> str:
    text = re.sub(
        r"<(?:(\w+):)?\w+>", lambda match: _DUMMIES.get(match[1], "x"), re.sub(r"\(\?P<", "(?P", pattern)
    )
    # allauth's and the admin's regular expressions: a group, whatever it takes, takes an x.
    return re.sub(r"\(\?P.*\)", "x", text).replace("\\Z", "").strip("^$")


PATHS = sorted({path for path in paths(get_resolver().url_patterns) if not path.startswith("/v1")})
OPERATORS = [
    path
    for path in PATHS
    # To end one's own session is anybody's.
    if path.startswith(("/admin/", "/operator/")) and path != "/admin/logout/"
]


pytestmark = [pytest.mark.django_db, pytest.mark.timeout(600)]


def test_routes_were_found():
    assert len(PATHS) > 150
    assert len(OPERATORS) > 80
    assert len([path for path in PATHS if path.startswith("/t/")]) == len(PAGES)


def test_what_answers_anybody_is_listed():
    anonymous = Client(raise_request_exception=False)
    answered = {path: anonymous.get(path).status_code for path in PATHS}
    assert {path for path, status in answered.items() if status in (200, 503)} == set(OPEN)
    assert set(answered.values()) <= {200, 301, 302, 401, 403, 404, 405, 410, 503}


def test_operators_pages_open_to_no_owner_of_a_tenant():
    cast = make_cast()
    owner = Client(raise_request_exception=False)
    owner.force_login(cast.owner)
    for path in OPERATORS:
        for answer in (owner.get(path), owner.post(path)):
            assert answer.status_code in (302, 403, 404, 405), path
            assert (
                answer.headers.get("Location", "/login").lstrip("/").startswith(("login", "admin/login"))
            ), path
            assert cast.other_tenant.name.encode() not in answer.content, path


def test_a_page_ends_with_a_slash_and_is_found_without():
    """So that an address that somebody types or shortens leads there; one for programs is one alone."""
    browser = Client(raise_request_exception=False)
    browser.force_login(make_cast().operator)
    for path in PATHS:
        if path.startswith("/admin/x") or not is_valid_path(
            path
        ):  # whatever else is below it; a dummy that is no link
            continue
        if path.startswith(NO_SLASH[:4]) or path.endswith(NO_SLASH[4:]):
            assert browser.get(f"{path}/").status_code in (404, 405), path
            continue
        assert path.endswith("/"), path
        if path != "/":
            answer = browser.get(path[:-1], {"next": "1"})
            assert (answer.status_code, answer.headers.get("Location")) == (301, f"{path}?next=1"), path
