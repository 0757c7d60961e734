"""One line of a batch, for each route that batches take: begun or taken up, followed to its end, and told.

Leaving in the middle cancels nothing: what runs is taken up by the next run of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from engine_worker.protocol import Chunk
from inference.api.chat_completions import ChatShape
from inference.api.completions import TextShape
from inference.api.response_shape import ResponseShape, new_response
from inference.errors import ApiError, InvalidRequest
from inference.runtime import Runtime
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.completions import CompletionRequest
from inference.schemas.embeddings import EmbeddingRequest
from inference.schemas.reading import read_value
from inference.schemas.responses import ResponseRequest
from inference.services.chat import start_chat
from inference.services.choices import Choice
from inference.services.completions import start_completions
from inference.services.embeddings import start_embedding
from inference.services.fan_in import chunks_of
from inference.services.generation import Generation
from tenants.principal import Principal

_KEEP_ALIVE_S: Final = 10.0
_Body = TypeVar("_Body", bound=msgspec.Struct)


class Line:
    """`begun` hears of each generation that the line has: what must be cancelled when the batch is."""

    def __init__(
        self,
        runtime: Runtime,
        principal: Principal,
        request_id: str,
        begun: Callable[[Generation], None],
    ) -> None:
        self._runtime = runtime
        self._principal = principal
        self._begun = begun
        self._how: dict[str, Any] = {"endpoint": "batches", "request_id": request_id, "may_exist": True}

    async def answer(self, route: str, body: dict[str, Any]) -> Any:
        """The answer's body. Raises ApiError."""
        if body.get("stream"):
            raise InvalidRequest(
                "A batch's lines can't be streamed: leave 'stream' out.", param="body.stream"
            )
        return await _ANSWERS[route](self, body)

    async def _chat(self, given: dict[str, Any]) -> Any:
        body = _read(given, ChatCompletionRequest)
        body.check()
        chat = await start_chat(self._runtime, self._principal, body, is_streamed=False, **self._how)
        choices = await self._collected([chat.generation], body.num_choices())
        tier = self._principal.tier.name
        return ChatShape(chat.generation, body, chat.model, chat.tool_form, tier).whole(choices)

    async def _completion(self, given: dict[str, Any]) -> Any:
        body = _read(given, CompletionRequest)
        body.check()
        prompted = await start_completions(
            self._runtime, self._principal, body, is_streamed=False, **self._how
        )
        choices = await self._collected(prompted.generations, body.num_choices())
        return TextShape(self._how["request_id"], body, prompted).whole(choices)

    async def _embedding(self, given: dict[str, Any]) -> Any:
        body = _read(given, EmbeddingRequest)
        embedded = await start_embedding(self._runtime, self._principal, body, **self._how)
        last: list[Chunk] = []
        async for _, chunk in self._chunks([embedded.generation]):
            last = [chunk]
        return embedded.answer(last[0])

    async def _response(self, given: dict[str, Any]) -> Any:
        body = _read(given, ResponseRequest)
        for name in ("background", "previous_response_id", "store"):
            if getattr(body, name):
                raise InvalidRequest(
                    f"A batch's lines have no '{name}': leave it out.",
                    param=f"body.{name}",
                    code="unsupported_parameter",
                )
        body.store = False  # the batch's files are where its answers are kept
        body.check()
        chat = await start_chat(
            self._runtime,
            self._principal,
            body.to_chat(body.items()),
            max_tokens_param="max_output_tokens",
            is_streamed=False,
            **self._how,
        )
        response = new_response(body, self._how["request_id"], chat.model)
        response.service_tier = self._principal.tier.name
        shape = ResponseShape(response, chat.tool_form)
        async for _, chunk in self._chunks([chat.generation]):
            shape.events(chunk)
        assert chat.generation.finish is not None
        shape.last_event(chat.generation.finish)
        return shape.response

    async def _collected(self, generations: Sequence[Generation], n: int) -> list[Choice]:
        choices = [Choice() for _ in range(n * len(generations))]
        async for index, chunk in self._chunks(generations):
            choices[index * n + chunk.index].add(chunk)
        return choices

    async def _chunks(self, generations: Sequence[Generation]) -> Any:
        """Until all have ended well. Raises ApiError."""
        for generation in generations:
            self._begun(generation)
        async for item in chunks_of(generations, keep_alive_s=_KEEP_ALIVE_S):
            if item is not None:
                yield item
        failures: list[ApiError] = [
            failure for each in generations if (failure := each.failure()) is not None
        ]
        if failures:
            raise failures[0]


_ANSWERS: Final = {
    "/v1/chat/completions": Line._chat,
    "/v1/completions": Line._completion,
    "/v1/embeddings": Line._embedding,
    "/v1/responses": Line._response,
}


def _read(given: dict[str, Any], kind: type[_Body]) -> _Body:
    body: _Body = read_value(given, kind, where="body")
    return body
