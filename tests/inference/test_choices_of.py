"""A refusal says what would be right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference.errors import InvalidRequest
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.choices_of import choices_of
from inference.schemas.messages import MessageRequest
from inference.schemas.reading import read_json
from inference.schemas.responses import ResponseRequest

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
ASK = [{"role": "user", "content": "hi"}]


def _read(given: dict[str, Any], kind: Any) -> None:
    body = read_json(json.dumps({"model": "m", **given}).encode(), kind)
    if isinstance(body, ResponseRequest):
        body.items()


@pytest.mark.parametrize(
    ("kind", "given", "param", "words"),
    [
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [IMAGE]}]},
         "messages[0].content[0].type", "use 'text' or 'refusal'"),
        (ChatCompletionRequest, {"messages": [{"role": "function", "content": "x"}]},
         "messages[0].role", "use 'assistant' or 'developer' or 'system' or 'tool' or 'user'"),
        (ChatCompletionRequest, {"messages": ASK, "tools": [{"type": "web_search"}]},
         "tools[0].type", "use 'function'"),
        (ResponseRequest, {"input": [{"type": "item_reference", "id": "x"}]},
         "input[0].type", "use 'message' or 'function_call' or 'function_call_output'"),
        (MessageRequest, {"messages": ASK, "max_tokens": 1, "thinking": {"type": "enabled"}},
         "thinking.type", "use 'disabled'"),
    ],
)  # fmt: skip
def test_a_word_that_is_none_of_the_choices(kind: Any, given: dict[str, Any], param: str, words: str):
    with pytest.raises(InvalidRequest) as refused:
        _read(given, kind)
    assert refused.value.param == param
    assert str(refused.value).endswith(f": {words}.")


def test_what_is_no_choice_of_words_has_none():
    assert choices_of(ChatCompletionRequest, "temperature") == []
    assert choices_of(ChatCompletionRequest, "messages[0].nothing") == []
