"""The API as clients meet it: real sockets, the real gateway, a worker without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis
from django.conf import settings
from django.db import connection
from openai import OpenAI

from engine_worker.broker import keys
from tenants.principal import LimitMetric
from tests.e2e.site import MODEL, ROOT, TOOL_TEMPLATE, Site, running_site, wait_until
from tests.engine_worker.models import make_tiny_model
from tests.factories import make_key, make_tenant, set_limit

OPERATOR_TOKEN = "a program of the operator's"


@pytest.fixture(scope="session")
def site(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    scratch = tmp_path_factory.mktemp("api-site")
    more_env = {"WEIR_OPERATOR_TOKEN": OPERATOR_TOKEN}
    with running_site(connection.settings_dict, scratch, more_env=more_env) as site:
        yield site


@pytest.fixture
def key(transactional_db: None) -> str:
    """A key without limits but generous ones, of a tenant of its own."""
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 10_000)
    set_limit(tenant, LimitMetric.TOKENS, 10_000_000)
    return make_key(tenant).secret


@pytest.fixture
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def engine_model(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real engine with a tiny random model, whose tokens are bytes, as a second worker of the site."""
    name = "tiny-engine"
    directory = make_tiny_model(tmp_path_factory.mktemp(name), max_position_embeddings=4096)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TOOL_TEMPLATE}))
    with engine_of(site, f"{name}={directory}", "--block-size", "4", "--num-kv-blocks", "4096"):
        yield name


@contextmanager
def engine_of(site: Site, model: str, *more: str) -> Iterator[None]:
    """A real worker that serves NAME=MODEL, beside the site's own."""
    with site.log.open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "engine_worker", "--model", model, "--threads", "1", *more],
            cwd=ROOT, env=site.env | {"WEIR_MODEL_NAME": ""}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with redis.Redis.from_url(settings.REDIS_URL) as server:
            card = keys.model_prefix(model.partition("=")[0]) + "card"
            wait_until(lambda: server.exists(card) == 1, "the engine's worker", site.log, 600)
        yield
    finally:
        worker.terminate()
        worker.wait(30)


@pytest.fixture
def http(site: Site, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"{site.url}/v1/", headers={"Authorization": f"Bearer {key}"}, timeout=60
    ) as client:
        yield client


@pytest.fixture
def sdk(site: Site) -> Iterator[Callable[[str], OpenAI]]:
    clients: list[OpenAI] = []

    def connect(secret: str) -> OpenAI:
        clients.append(OpenAI(base_url=f"{site.url}/v1", api_key=secret, max_retries=0, timeout=60))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
