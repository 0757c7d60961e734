"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.protocol import Chunk
from inference.api.endpoint import ApiCall, endpoint
from inference.api.sse import events_of
from inference.schemas import answers
from inference.schemas.chat import ChatCompletionRequest
from inference.services.collect import collect
from inference.services.generation import Generation
from inference.services.prepare import tokenise_chat
from inference.services.submit import Submission, bucket_headers, new_request_id, submit
from tenants.principal import Scope


@endpoint("POST", scope=Scope.INFERENCE)
async def chat_completions(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    body = call.read(ChatCompletionRequest)
    body.check()
    model = await call.runtime.models.get(body.model)
    prompt = await tokenise_chat(call.runtime.models, model, body.messages, body.chat_template_kwargs)
    generation = await submit(
        call.runtime,
        call.principal,
        Submission(
            model=model,
            prompt_token_ids=prompt,
            fields=body,
            requested_tokens=body.requested_tokens,
            max_tokens_param=body.max_tokens_param,
            endpoint="chat.completions",
            request_id=new_request_id("chatcmpl"),
        ),
    )
    shape = _Shape(generation, fingerprint=model.card.revision, has_usage_chunk=body.wants_usage_chunk)
    headers = bucket_headers(generation.buckets)
    if body.stream:
        events = events_of([generation], render=shape.events, close=shape.last_events)
        return call.stream(events, headers=headers)
    (text,) = await collect([generation])
    return call.respond(shape.whole(text), headers=headers)


class _Shape:
    """A chat generation in OpenAI's words, whole or in chunks."""

    def __init__(self, generation: Generation, *, fingerprint: str, has_usage_chunk: bool) -> None:
        self._generation = generation
        self._id = generation.ticket.request_id
        self._created = int(time.time())
        self._fingerprint = f"fp_{fingerprint[:10]}"
        self._has_usage_chunk = has_usage_chunk
        self._has_begun = False

    def whole(self, text: str) -> answers.ChatCompletion:
        finish = self._generation.finish
        assert finish is not None
        return answers.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._generation.ticket.model,
            choices=[answers.ChatChoice(0, answers.ChatAnswerMessage(text), finish.reason)],
            usage=answers.usage_of(finish),
            system_fingerprint=self._fingerprint,
        )

    def events(self, _index: int, chunk: Chunk) -> Sequence[answers.ChatCompletionChunk]:
        events = []
        if not self._has_begun:
            self._has_begun = True
            events.append(self._chunk([answers.ChunkChoice(0, answers.ChatDelta("assistant", ""))]))
        if chunk.text:
            events.append(self._chunk([answers.ChunkChoice(0, answers.ChatDelta(content=chunk.text))]))
        if chunk.finish is not None and self._generation.failure() is None:
            events.append(self._chunk([answers.ChunkChoice(0, answers.ChatDelta(), chunk.finish.reason)]))
        return events

    def last_events(self) -> Sequence[answers.ChatCompletionChunk]:
        finish = self._generation.finish
        assert finish is not None
        if not self._has_usage_chunk:
            return []
        last = self._chunk([])
        last.usage = answers.usage_of(finish)
        return [last]

    def _chunk(self, choices: list[answers.ChunkChoice]) -> answers.ChatCompletionChunk:
        return answers.ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._generation.ticket.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=None if self._has_usage_chunk else msgspec.UNSET,
        )
