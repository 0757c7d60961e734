"""What is long in sum is not tokenised, and not turned into text again, in the event loop's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from inference.models_served import ModelCatalogue, ServedModel
from inference.prompts import PromptRenderer
from inference.services.prepare import echoes_of, tokenise_prompts, tokenise_texts
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
