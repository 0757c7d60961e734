"""Logs name the request and never carry secrets."""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from django.conf import settings
from django.test import AsyncClient, Client

from weir.logs import logging_config, mask

KEY = "wr_live_8fJq2LmN_abcdefghijklmnopqrstuvwxyz012345"


@pytest.fixture
def json_logs(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    logging.config.dictConfig(logging_config(as_json=True, level="INFO"))
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logging_config(as_json=False, level="INFO")
    logging.config.dictConfig(settings.LOGGING)


@pytest.mark.parametrize(
    "text",
    [
        f"key {KEY} refused",
        f"Authorization: Bearer {KEY}",
        "token sk-abcdefghijklmnop",
        "cannot reach redis://user:hunter2hunter2@redis:6379/0",
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str):
    masked = mask(text)
    assert "[masked]" in masked
    for secret in (KEY, "abcdefghijklmnop", "hunter2hunter2"):
        assert secret not in masked


def test_events_and_library_lines_share_one_format_and_one_mask(json_logs: Any):
    structlog.get_logger("tests").info("key_refused", key=KEY, prompt="what I asked", tenant="t1")
    logging.getLogger("some.library").warning("bad header %s", f"Bearer {KEY}")
    event, line = json_logs()
    assert event["event"] == "key_refused"
    assert event["tenant"] == "t1"
    assert event["prompt"] == "[masked]"
    assert KEY not in json.dumps([event, line])
    assert line["logger"] == "some.library"
    assert line["level"] == "warning"


def test_an_exception_is_masked_too(json_logs: Any):
    try:
        raise ValueError(f"rejected {KEY}")
    except ValueError:
        logging.getLogger("some.library").exception("failed")
    (line,) = json_logs()
    assert "Traceback" in line["exception"]
    assert KEY not in json.dumps(line)


@pytest.mark.parametrize(("level", "is_heard"), [("INFO", True), ("ERROR", False)])
def test_the_level_that_is_asked_for_holds_for_the_databases_driver(
    json_logs: Any, level: str, is_heard: bool
):
    """Which gives itself one as it is imported."""
    logging.config.dictConfig(logging_config(as_json=True, level=level))
    logging.getLogger("psycopg.pool").info("growing")
    logging.getLogger("psycopg.pool").warning("error connecting")
    assert [line["event"] for line in json_logs()] == ["error connecting"] * is_heard


@pytest.mark.django_db
def test_an_answer_names_its_request(client: Client):
    assert client.get("/login/", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    made_up = client.get("/login/", headers={"X-Request-Id": "two words\r\n"}).headers["X-Request-Id"]
    assert len(made_up) == 32


async def test_it_does_so_in_async_too():
    response = await AsyncClient().get("/no-such-page", headers={"X-Request-Id": "mine-2"})
    assert response.headers["X-Request-Id"] == "mine-2"
