"""Counting before asking, and a deadline of the client's own."""

from __future__ import annotations

import pytest


def test_the_count_is_what_is_charged(http, model):
    messages = [{"role": "user", "content": "hello"}]
    counted = http.post("tokenize", json={"model": model, "messages": messages}).json()
    asked = http.post("chat/completions", json={"model": model, "messages": messages, "max_tokens": 1}).json()
    assert counted["count"] == len(counted["tokens"]) == asked["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == 8192


def test_there_and_back(http, model):
    tokens = http.post("tokenize", json={"model": model, "prompt": "weir"}).json()["tokens"]
    assert http.post("detokenize", json={"model": model, "tokens": tokens}).json() == {"prompt": "weir"}
    for path, body in (("tokenize", {}), ("tokenize", {"prompt": "a", "messages": []}),
                       ("detokenize", {"tokens": [99_999]})):  # fmt: skip
        assert http.post(path, json={"model": model} | body).status_code == 400


def test_a_deadline_of_ones_own(http, model):
    ask = {"model": model, "prompt": "a", "max_tokens": 400}
    late = http.post("completions", json=ask, headers={"x-weir-deadline-s": "1"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("value", ["0", "-1", "x", "301", "1e3", "9" * 5000])
def test_never_longer_than_the_tiers(http, value):
    answer = http.get("models", headers={"x-weir-deadline-s": value})
    assert answer.status_code == 400
    assert "300" in answer.json()["error"]["message"]
