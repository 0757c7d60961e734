"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.protocol import Chunk, PositionLogprobs
from inference.api.endpoint import ApiCall, endpoint
from inference.api.sse import events_of
from inference.models_served import ServedModel
from inference.schemas import answers
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.logprobs import ChatLogprobs, chat_logprobs
from inference.services.choices import Choice, end_of, told_logprobs
from inference.services.collect import collect
from inference.services.generation import Generation
from inference.services.prepare import make_grammar, tokenise_chat
from inference.services.refusal import bucket_headers
from inference.services.submit import Submission, new_request_id, submit
from tenants.principal import Scope


@endpoint("POST", scope=Scope.INFERENCE)
async def chat_completions(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    body = call.read(ChatCompletionRequest)
    body.check()
    grace_s = call.resume_grace_s()
    model = await call.runtime.models.get(body.model)
    grammar = await make_grammar(call.runtime.models, body)
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
            grammar=grammar,
        ),
    )
    shape = ChatShape(generation, body, model)
    headers = bucket_headers(generation.buckets)
    if body.stream:
        events = events_of(
            [generation],
            render=shape.events,
            close=shape.last_events,
            can_resume=body.num_choices() == 1,
            grace_s=grace_s,
        )
        return call.stream(events, headers=headers)
    return call.respond(shape.whole(await collect([generation], n=body.num_choices())), headers=headers)


class ChatShape:
    """A chat generation in OpenAI's words, whole or in chunks."""

    def __init__(self, generation: Generation, body: ChatCompletionRequest, model: ServedModel) -> None:
        self._generation = generation
        self._id = generation.ticket.request_id
        self._created = int(time.time())
        self._fingerprint = f"fp_{model.card.revision[:10]}"
        self._texts = model.renderer.token_texts
        self._has_logprobs = bool(body.logprobs)
        self._has_usage_chunk = body.wants_usage_chunk
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice]) -> answers.ChatCompletion:
        finish = self._generation.finish
        assert finish is not None
        return answers.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._generation.ticket.model,
            choices=[
                answers.ChatChoice(
                    index,
                    answers.ChatAnswerMessage(choice.text),
                    choice.finish_reason or finish.reason,
                    self._logprobs(choice.logprobs),
                )
                for index, choice in enumerate(choices)
            ],
            usage=answers.usage_of(finish),
            system_fingerprint=self._fingerprint,
        )

    def events(self, _index: int, chunk: Chunk) -> Sequence[answers.ChatCompletionChunk]:
        events = []
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            events.append(self._choice(chunk, answers.ChatDelta("assistant", "")))
        logprobs = told_logprobs(chunk)
        if chunk.text or (logprobs and self._has_logprobs):
            delta = answers.ChatDelta(content=chunk.text)
            events.append(self._choice(chunk, delta, logprobs=self._logprobs(logprobs)))
        end = end_of(chunk)
        if end is not None and (chunk.finish is None or self._generation.failure() is None):
            events.append(self._choice(chunk, answers.ChatDelta(), end.reason))
        return events

    def last_events(self) -> Sequence[answers.ChatCompletionChunk]:
        finish = self._generation.finish
        assert finish is not None
        if not self._has_usage_chunk:
            return []
        last = self._chunk([])
        last.usage = answers.usage_of(finish)
        return [last]

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(positions, self._texts) if self._has_logprobs else None

    def _choice(
        self,
        chunk: Chunk,
        delta: answers.ChatDelta,
        finish_reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
    ) -> answers.ChatCompletionChunk:
        return self._chunk([answers.ChunkChoice(chunk.index, delta, finish_reason, logprobs)])

    def _chunk(self, choices: list[answers.ChunkChoice]) -> answers.ChatCompletionChunk:
        return answers.ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._generation.ticket.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=None if self._has_usage_chunk else msgspec.UNSET,
        )
