"""The OpenAPI document says what the routes do; schemathesis asks the running product whether that is true."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from django.conf import settings
from django.test import Client
from django.urls import URLPattern

from engine_worker.broker import ControlBroker
from engine_worker.broker.commands import ProcessStatus
from inference import operator_urls
from inference.api.openapi import operations_of
from inference.api.urls import api_document, urlpatterns
from tenants.principal import LimitMetric, Scope
from tests.e2e.site import ROOT
from tests.factories import make_key, make_operator, make_tenant, make_user, set_limit
from tests.inference.conftest import OPERATOR_TOKEN

DOCUMENT: dict[str, Any] = json.loads(api_document.body)
ROUTES = {"/v1/": urlpatterns, "/operator/": operator_urls.urlpatterns}
EXAMPLES = int(os.environ.get("WEIR_FUZZ_EXAMPLES", "2"))
"""Random cases per operation; those that the schemas' borders give come besides."""


def test_every_route_is_described():
    described = {path for path, _ in operations_of(ROUTES)}
    paths = {
        under + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(route.pattern))
        for under, routes in ROUTES.items()
        for route in routes
        if isinstance(route, URLPattern) and route.name != "openapi"
    }
    assert paths - {"/v1/"} == described == set(DOCUMENT["paths"])


def test_every_operation_says_what_it_reads():
    for path, operation in operations_of(ROUTES):
        assert operation.summary, path
        source = inspect.getsource(operation.view)
        read = re.findall(r"(?:call\.(?:read|query)\(|read_body\(request, )(\w+)\)", source)
        assert ("read_body" in source) == (path.startswith("/operator") and operation.body is not None)
        told = {each.__name__ for each in (operation.body, operation.query) if each is not None}
        assert set(read) <= told, (path, read, told)


def test_the_schemas_are_schemas_and_every_reference_leads_somewhere():
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = api_document.body.decode()
    names = set(re.findall(r'"#/components/(\w+)/([^"]+)"', text))
    assert len(names) > 50
    for kind, name in names:
        assert name in DOCUMENT["components"][kind]
    # The words below a field in the source are its description.
    schemas = DOCUMENT["components"]["schemas"]
    assert "same secret" in schemas["Rotation"]["properties"]["rotation_id"]["description"]


def test_it_is_served_to_everybody(site):
    answer = httpx.get(f"{site.url}/v1/openapi.json", timeout=60)
    assert answer.json() == DOCUMENT
    assert httpx.post(f"{site.url}/v1/openapi.json", timeout=60).status_code == 405


def test_the_reference_page_lists_every_operation(site):
    page = httpx.get(f"{site.url}/docs/api/", timeout=60)
    assert page.status_code == 200
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            assert f'id="{operation["operationId"]}"' in page.text, (method, path)
    assert len(page.content) < 300_000


def test_the_operators_routes_have_a_tag_and_ways_in_of_their_own():
    schemes = DOCUMENT["components"]["securitySchemes"]
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            if not path.startswith("/operator/"):
                assert "security" not in operation
                continue
            assert operation["tags"] == ["operator"]
            ways = [set(way) for way in operation["security"]]
            assert {"session"} | ({"csrfToken"} if method != "get" else set()) in ways
            assert ({"operatorToken"} in ways) == (path != "/operator/live")
            assert set().union(*ways) <= set(schemes)


@pytest.mark.django_db
def test_what_the_operators_routes_answer_is_as_described():
    def fits(answer: Any, path: str) -> None:
        described = DOCUMENT["paths"][path]["get"]["responses"][str(answer.status_code)]
        schema = described["content"]["application/json"]["schema"] | {"components": DOCUMENT["components"]}
        jsonschema.validate(answer.json(), schema, cls=jsonschema.Draft202012Validator)

    for person, status in ((make_user(), 403), (make_operator(), 200)):
        browser = Client()
        browser.force_login(person)
        for path in ("/operator/live", "/operator/workers"):
            answer = browser.get(path)
            assert answer.status_code == status
            fits(answer, path)


def fuzzable(model: str, under: str) -> dict[str, Any]:
    """The document's part with a model that exists, and short answers: what is found deeper is worth more."""
    document: dict[str, Any] = json.loads(api_document.body)
    document["paths"] = {path: told for path, told in document["paths"].items() if path.startswith(under)}
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if name.endswith("Request") and "model" in fields:
            fields["model"] = {"enum": [model]}
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
            if field in fields and name.endswith("Request"):
                fields[field] = {"type": "integer", "minimum": 1, "maximum": 3}
                schema["required"] = [*schema.get("required", []), field]
    return document


@pytest.fixture
def find_mismatches(site, tmp_path: Path) -> Callable[[dict[str, Any], str], str]:
    """What schemathesis says of a document when it comes with that token; "": nothing is wrong."""
    # HTTP lets a request have any header, and a query any parameter.
    (tmp_path / "schemathesis.toml").write_text("[generation]\nallow-extra-parameters = false\n")

    def find(document: dict[str, Any], bearer: str) -> str:
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", site.url,
             "-H", f"Authorization: Bearer {bearer}", "--max-examples", str(EXAMPLES), "--seed", "1",
             "--phases", "examples,coverage,fuzzing" if EXAMPLES > 10 else "examples,fuzzing",
             "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,"
             "response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method",
             "--request-timeout", "60", "--generation-database", "none", "--no-shrink", "--no-color",
             # What a text can't be is rarely generated (the month of a statement); it says nothing of the API.
             "--suppress-health-check", "filter_too_much",
             "--warnings", "off", "--continue-on-failure"],
            cwd=tmp_path, capture_output=True, text=True, timeout=3500, check=False,
        )  # fmt: skip
        return done.stdout[-12_000:] + done.stderr[-2000:] if done.returncode else ""

    return find


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(3600)
def test_schemathesis_finds_no_mismatch(find_mismatches, model):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 1_000_000)
    secret = make_key(tenant, scopes=tuple(Scope)).secret
    found = find_mismatches(fuzzable(model, "/v1/"), secret)
    assert not found, found


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(3600)
def test_schemathesis_finds_none_in_the_operators_routes(find_mismatches, model):
    with living_process() as worker_id:
        document = fuzzable(model, "/operator/")
        for operations in document["paths"].values():
            for operation in operations.values():
                for parameter in operation["parameters"]:
                    if parameter["name"] == "worker_id":
                        parameter["schema"] = {"enum": [worker_id, "nobody"]}
        found = find_mismatches(document, OPERATOR_TOKEN)
    assert not found, found


@contextlib.contextmanager
def living_process() -> Iterator[str]:
    """A worker process that takes no command, as long as that is needed; its id."""
    status = ProcessStatus(
        worker_id=f"idle-{uuid.uuid4().hex}", started_at_ms=1, updated_at_ms=1, max_models=2, models=["m"]
    )
    is_over = threading.Event()

    async def beat() -> None:
        control = ControlBroker(settings.REDIS_URL, timeout_s=10)
        await control.heartbeat(status)
        is_alive.set()
        while not await asyncio.to_thread(is_over.wait, 2):
            await control.heartbeat(status)
        await control.farewell(status.worker_id)
        await control.aclose()

    is_alive = threading.Event()
    beating = threading.Thread(target=lambda: asyncio.run(beat()))
    beating.start()
    try:
        assert is_alive.wait(30)
        yield status.worker_id
    finally:
        is_over.set()
        beating.join(60)


def test_what_the_table_of_promises_names_is_there():
    _, _, table = (ROOT / "docs" / "api.md").read_text().partition("## What is promised")
    named = re.findall(r"`([\w/]+\.py)`", table)
    assert len(named) > 20
    for name in named:
        path = ROOT / name if name.startswith("tests/") else ROOT / "tests" / "inference" / name
        assert path.is_file(), name
    for name in re.findall(r"`make bench-(\w+)`", table):
        assert (ROOT / "benchmarks" / name).is_dir()
