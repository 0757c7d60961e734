"""Addresses, query parameters and encodings that won't do: each is told by its name."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx
import pytest

from inference.errors import ApiError
from tenants.principal import Scope
from tests.factories import make_key, make_tenant
from tests.inference.api.test_errors import CHAT, GOOD, error_of


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("GET", "models/", "/v1/models"),
        ("POST", "models/", None),
        ("POST", "chat/completions/", "/v1/chat/completions"),
        ("GET", "//files//x/content//", "/v1/files/x/content"),
        ("POST", "chat/completion", "/v1/chat/completions"),
        ("GET", "chat/completion", None),
        ("POST", "v1/chat/completions", "/v1/chat/completions"),
        ("GET", "request/chatcmpl-1/stream", "/v1/requests/chatcmpl-1/stream"),
        ("GET", "file/0123456789abcdef", "/v1/files/0123456789abcdef"),
        ("DELETE", "file/0123456789abcdef", "/v1/files/0123456789abcdef"),
        ("POST", "file/0123456789abcdef", None),
        ("DELETE", "keys/xx", None),
        ("GET", "organisation/limit", "/v1/organization/limits"),
        ("GET", "paint/0123456789abcdef", None),
        ("POST", "images/generations", None),
        ("GET", "models" * 50, None),
        ("GET", "nothing/", None),
        ("POST", "nothing", None),
        # Where an id stands they would be taken for one.
        ("GET", "requests/%2e%2e/models", "/v1/models"),
        ("POST", "requests/%2e%2e/cancel", None),
        ("GET", "models/%2e%2e/%2e/keys", "/v1/keys"),
        ("GET", "requests/%2e%2e", None),
        ("GET", "requests/%2e%2e/%2e%2e/admin", None),
    ],
)
def test_the_nearest_address_that_takes_the_method_is_told(http, method, path, meant):
    answer = http.request(method, str(http.base_url) + path)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    listed = "here. GET /v1/openapi.json lists what there is."
    assert error["message"].endswith(f"Did you mean {meant}?" if meant else listed)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        *((f"/{route}", f"/v1/{route}") for route in ("completions", "embeddings", "messages", "responses")),
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/models/some/name", "/v1/models/some/name"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/V1/chat/completions", "/v1/chat/completions"),
    ],
)
def test_a_base_url_that_is_none_is_told(site, path, meant):
    method = "GET" if "models" in path else "POST"
    answer = httpx.request(method, site.url + path, timeout=60)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert re.search(
        rf" here\. The base URL of the API is http://\S+/v1\. Did you mean {meant}\?$", error["message"]
    )
    for_people = httpx.get(site.url + path, headers=AS_BROWSERS, timeout=60)
    assert (for_people.status_code, for_people.headers["Content-Type"][:9]) == (404, "text/html")
    anthropic = httpx.post(site.url + path, headers={"anthropic-version": "2023-06-01"}, timeout=60)
    assert anthropic.json()["error"]["type"] == "not_found_error"


AS_BROWSERS = {"Accept": "text/html,application/xhtml+xml,application/json;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/api/tags"), ("POST", "/api/chat"), ("GET", "/V1/paint")]
)
@pytest.mark.parametrize(
    "spoken",
    [
        {"Accept": "application/json"},
        {"Authorization": "Bearer wr_x"},
        {"x-api-key": "wr_x"},
        {"Content-Type": "application/json; charset=utf-8"},
    ],
)
def test_programs_elsewhere_are_told_in_json_where_the_api_is(site, method, path, spoken):
    answer = httpx.request(method, site.url + path, headers=spoken, timeout=60)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    told = r" here\. The base URL of the API is http://\S+/v1\. GET /v1/openapi\.json lists what there is\.$"
    assert re.search(told, error["message"])
    page = httpx.request(method, site.url + path, headers=spoken | AS_BROWSERS, timeout=60)
    assert (page.status_code, page.headers["Content-Type"][:9]) == (404, "text/html")


_MESSAGE = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("method", "path", "given", "param", "words"),
    [
        ("POST", "webhooks", {"url": "https://example.com", "kinds": ["pink"]}, "kinds[0]",
         "budget key_expiry unusual_spend"),
        ("POST", "keys", {"name": "x", "scopes": ["pink"]}, "scopes", "inference usage:read keys:write admin"),
        ("POST", "keys", {"name": "x", "max_tier": "pink"}, "max_tier", "standard"),
        ("POST", "quota/try", {"metric": "pink", "amount": 1}, "metric", "requests tokens concurrency cost"),
        ("POST", "quota/try", {"metric": "tokens", "amount": 1, "calendar": "pink"}, "calendar", "day month"),
        ("GET", "usage", {"finish_reason": "pink"}, "finish_reason", "stop length cancelled deadline error"),
        ("GET", "usage", {"group_by": "pink"}, "group_by", "project key model tier finish_reason"),
        ("POST", "usage/exports", {"finish_reason": ["pink"]}, "finish_reason", "stop length cancelled"),
        ("POST", "usage/exports", {"bucket_width": "pink"}, "bucket_width", "1d 1h"),
        ("POST", "usage/exports", {"format": "pink"}, "format", "csv xlsx"),
        ("GET", "files", {"order": "pink"}, "order", "asc desc"),
        ("POST", "embeddings", {"model": "m", "input": "x", "encoding_format": "pink"}, "encoding_format",
         "float base64"),
        ("POST", CHAT, {**GOOD, "model": "m", "messages": [{"role": "pink"}]}, "messages[0].role",
         "system developer user assistant tool"),
        ("POST", CHAT, {**GOOD, "model": "MODEL", "service_tier": "pink"}, "service_tier",
         "standard auto default flex"),
        ("POST", CHAT, {**GOOD, "model": "m", "response_format": {"type": "pink"}}, "response_format",
         "text json_object json_schema"),
        ("POST", CHAT, {**GOOD, "model": "m", "tool_choice": "pink"}, "tool_choice", "none auto required"),
        ("POST", "messages", {**_MESSAGE, "model": "m", "service_tier": "pink"}, "service_tier",
         "auto standard_only"),
        ("POST", "messages", {**_MESSAGE, "model": "m", "tool_choice": {"type": "pink"}}, "tool_choice.type",
         "auto any tool none"),
        ("POST", "responses", {"model": "m", "input": "x", "truncation": "pink"}, "truncation", "disabled"),
        ("POST", "batches", {"input_file_id": "f", "endpoint": "pink", "completion_window": "24h"}, "endpoint",
         "/v1/chat/completions /v1/completions /v1/embeddings /v1/responses"),
    ],
)  # fmt: skip
def test_what_is_none_of_a_set_is_told_the_set(http, model, method, path, given, param, words):
    tenant = make_tenant()
    http.headers["Authorization"] = f"Bearer {make_key(tenant, scopes=list(Scope)).secret}"
    if given.get("model") == "MODEL":
        given = given | {"model": model}
    answer = http.request(method, path, **({"params": given} if method == "GET" else {"json": given}))
    told = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    said = re.split(r"[^\w:/]+", told["message"])
    assert set(words.split()) <= set(said), told["message"]
    assert (told.get("param") or param).startswith(param)


@pytest.mark.parametrize("encoding", ["gzip", "br", "x-own, gzip"])
def test_a_compressed_body_is_refused_for_what_it_is(http, model, encoding):
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    for content in (gzip.compress(json.dumps({"model": model, **GOOD}).encode()), b"no gzip"):
        answer = http.post(CHAT, content=content, headers=headers)
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (415, "Content-Encoding")
        assert answer.headers["Accept-Encoding"] == "identity"
    upload = http.post(
        "files", files={"file": b"{}"}, data={"purpose": "batch"}, headers={"Content-Encoding": encoding}
    )
    assert (upload.status_code, error_of(upload)["param"]) == (415, "Content-Encoding")
    plain = http.post(CHAT, json={"model": model, **GOOD}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.django_db(transaction=True)
def test_a_value_that_a_parameter_can_not_have_is_refused_on_every_route(site):
    """And what is no parameter of a route is left alone, but where a filter that is not applied is a wrong sum."""
    secret = make_key(scopes=[Scope.INFERENCE, Scope.USAGE_READ, Scope.ADMIN]).secret
    sums = ("/v1/usage", "/v1/organization/usage", "/v1/organization/costs", "/v1/audit")
    others = ("/v1/usage/statement", "/v1/usage/exports")
    document = httpx.get(f"{site.url}/v1/openapi.json", timeout=60).json()
    asked = 0
    with httpx.Client(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
        for path, item in document["paths"].items():
            operation = item.get("get")
            if operation is None or not path.startswith("/v1/") or path == "/v1/openapi.json":
                continue
            url = site.url + re.sub(r"{\w+}", "x", path)
            needed = {"start_time": "1"} if "/organization/" in path else {}
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query" and is_narrow(parameter["schema"], document):
                    answer = client.get(url, params=needed | {parameter["name"]: "no such value"})
                    assert answer.status_code == 400, (path, parameter, answer.text)
                    assert error_of(answer)["param"].partition("[")[0] == parameter["name"].removesuffix("[]")
                    asked += 1
            many = client.get(url, params={f"a{i}": "1" for i in range(1001)})
            assert many.status_code < 500, (path, many.text)
            answer = client.get(url, params=needed | {"beta": "true"})
            is_refused = answer.status_code == 400 and error_of(answer)["param"] == "beta"
            is_sum = path.startswith(sums) and not path.startswith(others)
            assert is_refused == is_sum, (path, answer.text)
    assert asked > 20


def is_narrow(schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether some text is none of its values."""
    if "$ref" in schema:
        return is_narrow(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    if several := schema.get("anyOf"):
        return all(is_narrow(each, document) for each in several)
    if schema.get("type") == "array":
        return is_narrow(schema["items"], document)
    return "enum" in schema or schema.get("type") in ("integer", "number", "boolean", "null")


def test_every_error_has_a_code():
    """Who tells errors apart by code gets null from none, whatever its view forgot to say."""
    kinds: list[type[ApiError]] = [ApiError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "__init__" not in vars(kind):
            assert kind("words").body()["code"], kind
    assert len(kinds) > 12
