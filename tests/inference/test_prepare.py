"""What is long in sum is not tokenised, and not turned into text again, in the event loop's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest

from inference.models_served import ModelCatalogue, ServedModel
from inference.prompts import PromptRenderer
from inference.schemas.chat import ChatMessage
from inference.services.prepare import echoes_of, tokenise_chat, tokenise_prompts, tokenise_texts
from tests.inference.test_prompts import renderer


class Watched:
    """A renderer, and the threads that used it."""

    def __init__(self, within: PromptRenderer) -> None:
        self._within = within
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        self.threads.add(threading.get_ident())
        return getattr(self._within, name)


@pytest.fixture
def catalogue() -> Iterator[ModelCatalogue]:
    made = ModelCatalogue(cast(Any, None), cast(Any, None))
    yield made
    made.executor.shutdown()


@pytest.fixture
def watched() -> Watched:
    return Watched(renderer())


@pytest.fixture
def model(watched: Watched) -> ServedModel:
    return ServedModel(renderer().card, cast(PromptRenderer, watched), 0)


@pytest.mark.parametrize(
    ("prompts", "is_long"),
    [(["short"], False), (["short", [1, 2]], False), (["short " * 20] * 64, True), ([[7] * 3000], True)],
)
async def test_prompts_that_are_long_together_leave_the_loop_alone(
    catalogue, model, watched, prompts: Sequence[Any], is_long
):
    ids = await tokenise_prompts(catalogue, model, list(prompts))
    assert ids == [one if isinstance(one, list) else renderer().text(one) for one in prompts]
    told = await echoes_of(catalogue, model, list(prompts))
    assert told == [one if isinstance(one, str) else renderer().decode(one) for one in prompts]
    assert (threading.get_ident() in watched.threads) is not is_long


async def test_lists_of_ids_to_be_embedded_are_checked_elsewhere(catalogue, model, watched):
    assert await tokenise_texts(catalogue, model, [[1, 2], "ab"]) == [[1, 2], renderer().text("ab")]
    assert watched.threads
    assert threading.get_ident() not in watched.threads


def messages_of(*said: dict[str, Any]) -> list[ChatMessage]:
    return msgspec.convert(said, list[ChatMessage])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_what_an_assistant_thought_goes_to_the_template(catalogue, name):
    said = messages_of(
        {"role": "assistant", "content": "So.", name: "Hm."}, {"role": "user", "content": "And?"}
    )
    thinking = renderer("{% for m in messages %}[{{ m.reasoning_content }}] {{ m.content }} {% endfor %}")
    ids = await tokenise_chat(catalogue, ServedModel(thinking.card, thinking, 0), said, None)
    assert thinking.decode(ids) == "[Hm.] So. [] And? "


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'["{"7" * 3000}"]'}}


@pytest.mark.parametrize(
    ("more", "is_long"),
    [
        ({}, False),
        ({"content": "x" * 3000}, True),
        ({"reasoning_content": "x" * 3000}, True),
        ({"tool_calls": [CALL]}, True),
    ],
    ids=["short", "content", "thoughts", "calls"],
)
async def test_whatever_is_long_in_a_chat_leaves_the_loop_alone(catalogue, model, watched, more, is_long):
    said = messages_of({"role": "assistant", "content": "x", **more}, {"role": "user", "content": "y"})
    await tokenise_chat(catalogue, model, said, None)
    assert (threading.get_ident() in watched.threads) is not is_long
