"""The OpenAPI document says what the routes do; schemathesis asks the running product whether that is true."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from django.urls import URLPattern

from inference.api.openapi import operations_of
from inference.api.urls import api_document, urlpatterns
from tenants.principal import LimitMetric, Scope
from tests.e2e.site import ROOT
from tests.factories import make_key, make_tenant, set_limit

DOCUMENT: dict[str, Any] = json.loads(api_document.body)
EXAMPLES = int(os.environ.get("WEIR_FUZZ_EXAMPLES", "2"))
"""Random cases per operation; those that the schemas' borders give come besides."""


def test_every_route_is_described():
    described = {path for path, _ in operations_of(urlpatterns)}
    named = [route for route in urlpatterns if isinstance(route, URLPattern) and route.name != "openapi"]
    paths = {"/v1/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(route.pattern)) for route in named}
    assert paths - {"/v1/"} == described == set(DOCUMENT["paths"])


def test_every_operation_says_what_it_reads():
    for path, operation in operations_of(urlpatterns):
        assert operation.summary, path
        source = inspect.getsource(operation.view)
        read = re.findall(r"call\.(?:read|query)\((\w+)\)", source)
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
    page = httpx.get(f"{site.url}/docs/api", timeout=60)
    assert page.status_code == 200
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            assert f'id="{operation["operationId"]}"' in page.text, (method, path)
    assert len(page.content) < 300_000


def fuzzable(model: str) -> dict[str, Any]:
    """The document with a model that exists, and short answers: what is found deeper is worth more."""
    document: dict[str, Any] = json.loads(api_document.body)
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if name.endswith("Request") and "model" in fields:
            fields["model"] = {"enum": [model]}
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
            if field in fields and name.endswith("Request"):
                fields[field] = {"type": "integer", "minimum": 1, "maximum": 3}
                schema["required"] = [*schema.get("required", []), field]
    return document


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(3600)
def test_schemathesis_finds_no_mismatch(site, model, tmp_path: Path):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 1_000_000)
    secret = make_key(tenant, scopes=tuple(Scope)).secret
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(fuzzable(model)))
    # HTTP lets a request have any header, and a query any parameter.
    (tmp_path / "schemathesis.toml").write_text("[generation]\nallow-extra-parameters = false\n")
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", site.url,
         "-H", f"Authorization: Bearer {secret}", "--max-examples", str(EXAMPLES), "--seed", "1",
         "--phases", "examples,coverage,fuzzing" if EXAMPLES > 10 else "examples,fuzzing",
         "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,"
         "response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method",
         "--request-timeout", "60", "--generation-database", "none", "--no-shrink", "--no-color",
         # What a text can't be is rarely generated (the month of a statement); it says nothing of the API.
         "--suppress-health-check", "filter_too_much",
         "--warnings", "off", "--continue-on-failure"],
        cwd=tmp_path, capture_output=True, text=True, timeout=3500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]


def test_what_the_table_of_promises_names_is_there():
    _, _, table = (ROOT / "docs" / "api.md").read_text().partition("## What is promised")
    named = re.findall(r"`([\w/]+\.py)`", table)
    assert len(named) > 20
    for name in named:
        path = ROOT / name if name.startswith("tests/") else ROOT / "tests" / "inference" / name
        assert path.is_file(), name
    for name in re.findall(r"`make bench-(\w+)`", table):
        assert (ROOT / "benchmarks" / name).is_dir()
