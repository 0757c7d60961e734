"""Bad input: a clear 4xx in OpenAI's shape that names the field, and never a 5xx."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenants.principal import LimitMetric, Scope
from tests.e2e.site import LATE_MODEL
from tests.factories import make_key, make_tenant, set_limit

CHAT = "chat/completions"
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    waits = {"retry_after"} if "retry-after" in response.headers else set()
    assert set(body["error"]) == {"message", "type", "param", "code"} | waits
    assert body["error"]["message"]
    assert body["error"]["code"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperature": 2.1}, "temperature", None),
        ({"temperature": "warm"}, "temperature", None),
        ({"top_p": 0}, "top_p", None),
        ({"presence_penalty": -3}, "presence_penalty", None),
        ({"n": 0}, "n", None),
        ({"tools": [{"type": "function"}]}, "tools[0].function", None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", None),
        ({"response_format": {"type": "xml"}}, "response_format", None),
        ({"logprobs": 3}, "logprobs", None),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", None),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", None),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "add_generation_prompt": False}},
            "chat_template_kwargs.add_generation_prompt",
            None,
        ),
        ({"stop": ["a"] * 5}, "stop", None),
        ({"stop": [""]}, "stop", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens", None),
        ({"min_tokens": 2}, "min_tokens", None),
        ({"logit_bias": {"265": 1}}, "logit_bias", None),
        ({"logit_bias": {"x": 1}}, "logit_bias", None),
        ({"stop_token_ids": [265]}, "stop_token_ids", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"temprature": 1}, "temprature", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user"}]}, "messages[0].content", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            None,
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
            "messages[0]",
            None,
        ),
        ({"metadata": {"n": 1}}, "metadata", None),
        ({"metadata": {"n": None}}, "metadata", None),
        ({"metadata": {"n" * 65: ""}}, "metadata", None),
        ({"metadata": {"n": "x" * 513}}, "metadata", None),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", None),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", None),
        ({"model": ""}, "model", None),
        ({"model": None}, "model", None),
    ],
)
def test_the_field_is_named(http, model, change, param, code):
    response = http.post(CHAT, json={"model": model, **GOOD, **change})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param)
    if code:
        assert error["code"] == code


def test_what_would_be_right_is_said_in_jsons_words(http, model):
    def said(**change: Any) -> str:
        return error_of(http.post(CHAT, json={"model": model, **GOOD, **change}))["message"]

    assert said(metadata={"n": 1}) == "Invalid value in 'metadata': expected 'string', got 'integer'."
    assert said(metadata={"n" * 65: ""}) == "Invalid key in 'metadata': expected 'string' of length <= 64."
    assert said(temperature="warm") == "Invalid 'temperature': expected 'number or null', got 'string'."


def test_a_model_that_is_on_its_way_is_not_unknown(site, http):
    on_its_way = http.post(CHAT, json={"model": LATE_MODEL, **GOOD})
    assert (on_its_way.status_code, error_of(on_its_way)["code"]) == (503, "model_unavailable")
    assert int(on_its_way.headers["retry-after"]) >= 1
    unknown = http.post(CHAT, json={"model": "nope", **GOOD})
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("max_tokens", [8191, 8192])
def test_fault_16_the_context_border(http, model, max_tokens):
    response = http.post("completions", json={"model": model, "prompt": [97], "max_tokens": max_tokens})
    # 1 + 8191 fits the context; the tier's cap on output is what refuses it.
    expected = "invalid_request" if max_tokens == 8191 else "context_length_exceeded"
    assert response.status_code == 400
    assert error_of(response)["code"] == expected


def test_fault_15_empty_prompts(http, model):
    for prompt in ("", [], [[]]):
        response = http.post("completions", json={"model": model, "prompt": prompt})
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[" * 50_000, {}, 400),
        (b'{"metadata":' + b'{"a":' * 50_000, {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"abc", {"Content-Type": "multipart/form-data"}, 415),
        (b"abc", {"Content-Type": "multipart/form-data; boundary=x"}, 415),
        (b"{}", {"Content-Type": "application/json; charset=latin-1"}, 415),
        (b" " * 6_000_000, {}, 413),
    ],
)
def test_bodies_that_are_none(http, content, headers, status):
    response = http.post(CHAT, content=content, headers={"Content-Type": "application/json", **headers})
    assert response.status_code == status
    error_of(response)


@pytest.mark.parametrize("form", ["", "; boundary=x", "; boundary=\xe9", "; boundary=" + "x" * 300])
def test_forms_that_are_none(http, form):
    response = http.post(
        "files", content=b"abc", headers={b"Content-Type": f"multipart/form-data{form}".encode()}
    )
    assert response.status_code == 400
    error_of(response)


def test_a_form_that_nobody_asked_for_is_not_read(http, model):
    """By the server neither: a body is the application's."""
    form = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--\r\n"
    response = http.post(CHAT, content=form, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


def test_arguments_too_deep_to_be_read_are_a_text(http, model):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 5000}}
    made = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    response = http.post(CHAT, json={"model": model, "messages": made, "max_tokens": 1})
    assert response.status_code in (200, 400), response.text


def test_routes_and_methods(http):
    assert error_of(http.get("nothing/here"))["code"] == "unknown_url"
    response = http.get(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    error_of(response)
    assert http.post("models").headers["allow"] == "GET, HEAD"
    assert http.delete("keys").headers["allow"] == "GET, POST, HEAD"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "NONSENSE"])
@pytest.mark.parametrize("path", [CHAT, "models", "messages", "keys"])
def test_every_other_method_is_a_405(http, path, method):
    response = http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]


@pytest.mark.parametrize(
    "path", ["%ff", "%00", "models/%ff%00", "models/" + "x" * 5000, "requests/%00", "x" * 9000]
)
def test_odd_paths_are_not_found(http, path):
    response = http.get(path)
    assert response.status_code == 404
    assert len(error_of(response)["message"]) < 400


def test_v1_itself_answers_in_json(site):
    for method in ("GET", "POST"):
        response = httpx.request(method, f"{site.url}/v1", timeout=60)
        assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    "path", ["//v1/models", "//v1", "/operator", "/operator/", "/operator/zz", "/operator/models/zz"]
)
def test_addresses_for_programs_answer_in_json_and_others_with_a_page(site, path):
    response = httpx.get(f"{site.url}{path}", timeout=60)
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    for beside in ("/v12/models", "/operators", "/x/v12/models"):
        page = httpx.get(f"{site.url}{beside}", timeout=60)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")


def test_half_a_surrogate_pair_is_named(http, model):
    body = '{"model":"%s","messages":[{"role":"user","content":"a\\ud800b"}]}' % model  # noqa: UP031
    response = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in error_of(response)["message"]


@pytest.mark.parametrize("value", ["", "Bearer", "Basic abc", "Bearer wr_live_x", "Bearer é"])
def test_keys_that_are_none(site, value):
    response = httpx.get(f"{site.url}/v1/models", headers={b"Authorization": value.encode()}, timeout=60)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error_of(response)


@pytest.mark.django_db(transaction=True)
def test_a_key_without_the_scope(site, model):
    secret = make_key(scopes=(Scope.USAGE_READ,)).secret
    response = httpx.post(
        f"{site.url}/v1/{CHAT}",
        headers={"Authorization": f"Bearer {secret}"},
        json={"model": model, **GOOD},
        timeout=60,
    )
    assert (response.status_code, error_of(response)["code"]) == (403, "insufficient_permissions")


@pytest.mark.django_db(transaction=True)
def test_fault_52_what_can_never_fit_is_a_400(site, model):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.TOKENS, 5)
    secret = make_key(tenant).secret
    with httpx.Client(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
        response = client.post(
            f"{site.url}/v1/completions", json={"model": model, "prompt": "too long for it", "max_tokens": 1}
        )
        assert (response.status_code, error_of(response)["code"]) == (400, "request_exceeds_limit")
        assert "retry-after" not in response.headers
        fits = client.post(
            f"{site.url}/v1/completions", json={"model": model, "prompt": "abc", "max_tokens": 2}
        )
        assert fits.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "temperature", "top_p", "stop", "seed", "logit_bias", "max_tokens", "n",
     "stream", "stream_options", "min_p", "top_k", "stop_token_ids", "tools", "user", "extra"]
)  # fmt: skip


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(route=st.sampled_from([CHAT, "completions"]), change=st.dictionaries(FIELDS, JSON, max_size=3))
def test_hostile_bodies_never_break_it(http, model, route, change):
    good = GOOD if route == CHAT else {"prompt": "hi", "max_tokens": 1}
    fields = {"model": model, **good, **change}
    if fields.get("max_tokens") is None or fields["max_tokens"] in range(8, 5000):
        fields["max_tokens"] = 1  # an answer as long as the context is not what this is about
    body = json.dumps(fields)
    response = http.post(route, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code < 500
