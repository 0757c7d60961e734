"""`POST /v1/completions`: one choice, and one row in the ledger, per prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.protocol import Chunk, Finish
from inference.api.endpoint import ApiCall, endpoint
from inference.api.sse import events_of
from inference.models_served import ServedModel
from inference.schemas import answers
from inference.schemas.completions import MAX_TOKENS_DEFAULT, CompletionRequest
from inference.services.collect import collect
from inference.services.generation import Generation
from inference.services.prepare import tokenise_prompt
from inference.services.submit import Submission, bucket_headers, new_request_id, submit
from tenants.principal import Scope


@endpoint("POST", scope=Scope.INFERENCE)
async def completions(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    body = call.read(CompletionRequest)
    body.check()
    model = await call.runtime.models.get(body.model)
    completion_id = new_request_id("cmpl")
    generations = await _submit_all(call, body, model, completion_id)
    shape = _Shape(completion_id, model, generations, has_usage_chunk=body.wants_usage_chunk)
    headers = bucket_headers(generations[-1].buckets)
    if body.stream:
        events = events_of(generations, render=shape.events, close=shape.last_events)
        return call.stream(events, headers=headers)
    return call.respond(shape.whole(await collect(generations)), headers=headers)


async def _submit_all(
    call: ApiCall, body: CompletionRequest, model: ServedModel, completion_id: str
) -> list[Generation]:
    prompts = [await tokenise_prompt(call.runtime.models, model, prompt) for prompt in body.prompts()]
    generations: list[Generation] = []
    try:
        for index, prompt in enumerate(prompts):
            asked = Submission(
                model=model,
                prompt_token_ids=prompt,
                fields=body,
                requested_tokens=body.max_tokens or MAX_TOKENS_DEFAULT,
                max_tokens_param="max_tokens",
                endpoint="completions",
                request_id=completion_id if len(prompts) == 1 else f"{completion_id}-{index}",
            )
            generations.append(await submit(call.runtime, call.principal, asked))
    except BaseException:
        # All prompts or none: what was admitted before the refusal is given back.
        for generation in generations:
            generation.leave()
        raise
    return generations


class _Shape:
    """Text generations in OpenAI's words, whole or in chunks."""

    def __init__(
        self, completion_id: str, model: ServedModel, generations: list[Generation], *, has_usage_chunk: bool
    ) -> None:
        self._id = completion_id
        self._model = model.card.model
        self._fingerprint = f"fp_{model.card.revision[:10]}"
        self._created = int(time.time())
        self._generations = generations
        self._has_usage_chunk = has_usage_chunk

    def whole(self, texts: list[str]) -> answers.Completion:
        choices = [
            answers.TextChoice(index, text, finish.reason)
            for index, (text, finish) in enumerate(zip(texts, self._finishes(), strict=True))
        ]
        return self._body(choices, answers.usage_of(*self._finishes()))

    def events(self, index: int, chunk: Chunk) -> Sequence[answers.Completion]:
        is_good_end = chunk.finish is not None and self._generations[index].failure() is None
        if not chunk.text and not is_good_end:
            return []
        reason = chunk.finish.reason if chunk.finish is not None and is_good_end else None
        return [self._body([answers.TextChoice(index, chunk.text, reason)], self._no_usage())]

    def last_events(self) -> Sequence[answers.Completion]:
        return [self._body([], answers.usage_of(*self._finishes()))] if self._has_usage_chunk else []

    def _finishes(self) -> list[Finish]:
        return [generation.finish for generation in self._generations if generation.finish is not None]

    def _no_usage(self) -> msgspec.UnsetType | None:
        return None if self._has_usage_chunk else msgspec.UNSET

    def _body(
        self, choices: list[answers.TextChoice], usage: answers.Usage | msgspec.UnsetType | None
    ) -> answers.Completion:
        return answers.Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )
