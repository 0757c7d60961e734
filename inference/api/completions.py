"""`POST /v1/completions`: `n` choices, and one row in the ledger, per prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.protocol import Chunk, Finish, PositionLogprobs
from inference.api.endpoint import ApiCall, endpoint
from inference.api.sse import events_of
from inference.schemas import answers
from inference.schemas.completions import CompletionRequest
from inference.schemas.logprobs import PromptLogprobs, TextLogprobs, prompt_logprobs, text_logprobs
from inference.services.choices import Choice, best_of, end_of, num_logprobs, told_logprobs
from inference.services.collect import collect
from inference.services.completions import Prompted, start_completions
from inference.services.submission import made_at
from inference.services.tiering import in_asked_tier
from tenants.principal import Scope


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=CompletionRequest,
    answer=answers.Completion,
    events=(answers.Completion,),
    headers=("Idempotency-Key", "x-weir-deadline-s", "x-weir-resume-grace"),
    generates=True,
)
async def completions(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    """Goes on from one prompt or several."""
    body = call.read(CompletionRequest)
    body.check()
    grace_s = call.resume_grace_s()
    call.principal = await in_asked_tier(call.principal, priority=body.priority)
    completion_id = call.new_request_id("cmpl")
    prompted = await start_completions(
        call.runtime,
        call.principal,
        body,
        endpoint="completions",
        request_id=completion_id,
        is_streamed=bool(body.stream),
        may_exist=call.may_exist,
    )
    generations = prompted.generations
    shape = TextShape(completion_id, body, prompted)

    def headers() -> dict[str, str]:
        slowest = max(generations, key=lambda generation: generation.queued_ms or 0)
        return generations[-1].headers() | slowest.queue_header()

    if body.stream:
        events = events_of(
            generations,
            render=shape.events,
            close=shape.last_events,
            can_resume=body.num_choices() == 1 and len(generations) == 1,
            grace_s=grace_s,
            breaks_off=not call.may_exist,
        )
        return await call.stream(events, headers=headers)
    choices = await collect(generations, n=body.num_choices(), breaks_off=not call.may_exist)
    return await call.respond_off_loop(
        lambda: shape.whole(choices), size=num_logprobs(choices), headers=headers()
    )


class TextShape:
    """Text generations in OpenAI's words, whole or in chunks."""

    def __init__(
        self,
        completion_id: str,
        body: CompletionRequest,
        prompted: Prompted,
    ) -> None:
        model, prompts, generations = prompted.model, prompted.prompts, prompted.generations
        self._id = completion_id
        self._model = model.card.model
        self._fingerprint = f"fp_{model.card.revision[:10]}"
        self._texts = model.renderer.token_texts
        self._created = made_at(completion_id)
        self._generations = generations
        self._has_usage_chunk = body.wants_usage_chunk
        self._n = body.num_told()
        self._has_logprobs = body.logprobs is not None
        self._num_told = body.logprobs or 0
        self._num_scores = body.prompt_logprobs
        self._first_tokens = [prompt[0] for prompt in prompts]
        self._echoes = prompted.echoes
        self._prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        self._offsets: dict[int, int] = {}
        """Characters of each choice that are out, by its index."""

    def whole(self, choices: list[Choice]) -> answers.Completion:
        made = len(choices) // len(self._generations)
        for index, choice in enumerate(choices):
            if choice.prompt_logprobs is not None:
                self._prompt_logprobs[index // made] = choice.prompt_logprobs
        choices = [
            choice
            for start in range(0, len(choices), made)
            for choice in best_of(choices[start : start + made], self._n)
        ]
        shown = [
            answers.TextChoice(
                index,
                self._echoes[index // self._n] + choice.text,
                choice.finish_reason or self._finishes()[index // self._n].reason,
                self._logprobs(index, choice.logprobs, is_first=True),
                self._told_scores(index // self._n),
            )
            for index, choice in enumerate(choices)
        ]
        return self._body(shown, answers.usage_of(*self._finishes()))

    def events(self, index: int, chunk: Chunk) -> Sequence[answers.Completion]:
        end = end_of(chunk)
        if chunk.finish is not None and self._generations[index].failure() is not None:
            end = None
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs[index] = chunk.prompt_logprobs
        told = told_logprobs(chunk)
        number = index * self._n + chunk.index
        is_first = number not in self._offsets
        text = (self._echoes[index] if is_first else "") + chunk.text
        if not text and not told and end is None:
            return []
        logprobs = self._logprobs(number, told, is_first=is_first)
        self._offsets.setdefault(number, 0)
        choice = answers.TextChoice(number, text, end.reason if end else None, logprobs)
        return [self._body([choice], self._no_usage())]

    def last_events(self) -> Sequence[answers.Completion]:
        return [self._body([], answers.usage_of(*self._finishes()))] if self._has_usage_chunk else []

    def _logprobs(
        self, number: int, positions: Sequence[PositionLogprobs], *, is_first: bool
    ) -> TextLogprobs | None:
        if not self._has_logprobs:
            return None
        generation = number // self._n
        first_token = None
        if is_first and self._echoes[generation]:
            first_token = self._first_tokens[generation]
            # Those may have more alternatives than are told here.
            prompt = self._prompt_logprobs.get(generation, ())
            positions = [
                *(msgspec.structs.replace(each, top=each.top[: self._num_told]) for each in prompt),
                *positions,
            ]
        offset = self._offsets.get(number, 0)
        logprobs = text_logprobs(positions, self._texts, offset=offset, first_token=first_token)
        self._offsets[number] = offset + sum(map(len, logprobs.tokens))
        return logprobs

    def _told_scores(self, generation: int) -> PromptLogprobs | msgspec.UnsetType:
        if self._num_scores is None:
            return msgspec.UNSET
        return prompt_logprobs(self._prompt_logprobs.get(generation, ()), self._texts, self._num_scores)

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
