"""Styles and scripts as a gateway serves them where they were collected, and where they were not."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.staticfiles.storage import staticfiles_storage
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.test import RequestFactory

from tests.e2e.site import ROOT
from weir.static_files import CollectedFiles, StaticFilesMiddleware

IMMUTABLE = "max-age=315360000, public, immutable"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twice: the second release finds the first one's files."""
    root = tmp_path_factory.mktemp("static")
    for _ in range(2):
        subprocess.run(
            [sys.executable, "manage.py", "collectstatic", "--no-input", "--verbosity=0"],
            cwd=ROOT, env=os.environ | {"WEIR_STATIC_ROOT": str(root)}, check=True, timeout=300,
        )  # fmt: skip
    return root


@pytest.fixture
def gateway(collected: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """What a gateway makes of them as it starts."""
    settings.STATIC_ROOT = collected
    monkeypatch.setattr(staticfiles_storage, "_wrapped", CollectedFiles())
    return Gateway(StaticFilesMiddleware(_nothing))


class Gateway:
    def __init__(self, middleware: StaticFilesMiddleware) -> None:
        self._middleware = middleware

    def get(self, path: str, **headers: str) -> HttpResponseBase:
        request = RequestFactory().get(path, headers=headers)  # type: ignore[arg-type]
        answer: HttpResponseBase = self._middleware(request)
        return answer


def _nothing(request: HttpRequest) -> HttpResponseBase:
    raise LookupError(request.path)


def body(answer: Any) -> bytes:
    with answer.file_to_stream:  # closing the answer itself would end a request, and ask the database
        return b"".join(answer.streaming_content)


def test_a_file_is_compressed_and_kept_for_ever_under_its_contents_name(gateway: Gateway):
    path = staticfiles_storage.url("weir/weir.css")
    assert re.fullmatch(r"/static/weir/weir\.[0-9a-f]{12}\.css", path)
    answer = gateway.get(path, accept_encoding="gzip")
    assert answer.headers["Cache-Control"] == IMMUTABLE
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept-Encoding"
    packed, plain = body(answer), body(gateway.get(path))
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 3


def test_modules_name_each_other_as_pages_name_them(gateway: Gateway):
    """A module under two names would run twice."""
    main = body(gateway.get(staticfiles_storage.url("weir/chat/main.js"))).decode()
    imported = re.findall(r'from\s*"([^"]+)"', main)
    assert len(imported) > 5
    for name in imported:
        assert re.search(r"\.[0-9a-f]{12}\.js$", name), name
        path = os.path.normpath(f"/static/weir/chat/{name}")
        assert body(gateway.get(path)), path
    assert "/static/weir/" + imported[0].rpartition("/")[2] == staticfiles_storage.url("weir/console.js")


def test_what_scripts_name_at_run_time_is_there_under_its_plain_name(gateway: Gateway):
    answer = gateway.get("/static/vendor/highlight/python.min.js", accept_encoding="gzip")
    assert gzip.decompress(body(answer)).startswith(b"/*!")
    assert answer.headers["Cache-Control"] == "max-age=60, public"


def test_the_admins_theme_leaves_out_what_it_does_not_show(gateway: Gateway):
    assert b"@font-face" not in body(gateway.get(staticfiles_storage.url("unfold/fonts/inter/styles.css")))
    assert len(body(gateway.get(staticfiles_storage.url("unfold/js/chart/chart.js")))) < 1000
    symbols = body(gateway.get(staticfiles_storage.url("unfold/fonts/material-symbols/styles.css"))).decode()
    font = re.search(r'url\("(symbols\.[0-9a-f]{12}\.woff2)"\)', symbols)
    assert font
    assert len(body(gateway.get(f"/static/unfold/fonts/material-symbols/{font[1]}"))) < 20_000


def test_without_collecting_they_come_from_the_packages(settings: Any, tmp_path: Path):
    settings.STATIC_ROOT = tmp_path / "none"
    storage = CollectedFiles()
    assert storage.url("weir/weir.css") == "/static/weir/weir.css"
    found = body(Gateway(StaticFilesMiddleware(_nothing)).get("/static/weir/weir.css"))
    assert found == (Path(django_settings.BASE_DIR) / "templates/static/weir/weir.css").read_bytes()
