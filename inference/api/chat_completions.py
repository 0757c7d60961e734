"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.protocol import Chunk, FinishReason, PositionLogprobs
from inference.api.endpoint import ApiCall, endpoint
from inference.api.sse import events_of
from inference.models_served import ServedModel
from inference.schemas import answers
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from inference.services.chat import start_chat
from inference.services.choices import Choice, end_of, num_logprobs, told_logprobs
from inference.services.collect import collect
from inference.services.generation import Generation
from inference.services.submission import made_at
from inference.services.tiering import in_asked_tier, told_tier
from inference.tool_calls import CallStarted, Part, ToolCallParser, ToolFormat
from tenants.principal import Scope


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=ChatCompletionRequest,
    answer=answers.ChatCompletion,
    events=(answers.ChatCompletionChunk,),
    headers=("Idempotency-Key", "x-weir-deadline-s", "x-weir-resume-grace"),
    generates=True,
)
async def chat_completions(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    """Answers a conversation, whole or streamed."""
    body = call.read(ChatCompletionRequest)
    body.check()
    grace_s = call.resume_grace_s()
    own_tier = call.principal.tier
    call.principal = await in_asked_tier(
        call.principal, service_tier=body.service_tier, priority=body.priority
    )
    chat = await start_chat(
        call.runtime,
        call.principal,
        body,
        endpoint="chat.completions",
        request_id=call.new_request_id("chatcmpl"),
        is_streamed=bool(body.stream),
        may_exist=call.may_exist,
    )
    generation = chat.generation
    tier = told_tier(body.service_tier, own=own_tier, served=call.principal.tier)
    shape = ChatShape(generation, body, chat.model, chat.tool_form, tier)
    if body.stream:
        events = events_of(
            [generation],
            render=shape.events,
            close=shape.last_events,
            # A tool call can't be taken out of the second half of its text.
            can_resume=body.num_choices() == 1 and chat.tool_form is None,
            grace_s=grace_s,
            breaks_off=not call.may_exist,
        )
        return await call.stream(events, headers=generation.headers)
    choices = await collect([generation], n=body.num_choices(), breaks_off=not call.may_exist)
    return await call.respond_off_loop(
        lambda: shape.whole(choices), size=num_logprobs(choices), headers=generation.headers()
    )


class ChatShape:
    """A chat generation in OpenAI's words, whole or in chunks."""

    def __init__(
        self,
        generation: Generation,
        body: ChatCompletionRequest,
        model: ServedModel,
        tool_form: ToolFormat | None,
        service_tier: str,
    ) -> None:
        self._service_tier = service_tier
        self._generation = generation
        self._id = generation.ticket.request_id
        self._created = made_at(self._id)
        self._fingerprint = f"fp_{model.card.revision[:10]}"
        self._texts = model.renderer.token_texts
        self._has_logprobs = bool(body.logprobs)
        self._num_scores = body.prompt_logprobs
        self._has_usage_chunk = body.wants_usage_chunk
        self._begun: set[int] = set()
        self._tool_form = tool_form
        self._parsers: dict[int, ToolCallParser] = {}

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
                    message,
                    _reason(choice.finish_reason or finish.reason, has_called=bool(message.tool_calls)),
                    self._logprobs(choice.logprobs),
                )
                for index, choice in enumerate(choices)
                for message in [self._message(choice.text)]
            ],
            usage=answers.usage_of(finish),
            system_fingerprint=self._fingerprint,
            service_tier=self._service_tier,
            prompt_logprobs=self._prompt_logprobs(choices[0].prompt_logprobs),
        )

    def events(self, _index: int, chunk: Chunk) -> Sequence[answers.ChatCompletionChunk]:
        events = []
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            events.append(self._choice(chunk, answers.ChatDelta("assistant", "")))
        logprobs = told_logprobs(chunk)
        end = end_of(chunk)
        deltas, has_called = self._deltas(chunk, is_last=end is not None)
        for at, delta in enumerate(deltas):
            events.append(self._choice(chunk, delta, logprobs=self._logprobs(logprobs if at == 0 else ())))
        if end is not None and (chunk.finish is None or self._generation.failure() is None):
            reason = _reason(end.reason, has_called=has_called)
            events.append(self._choice(chunk, answers.ChatDelta(), reason))
        return events

    def last_events(self) -> Sequence[answers.ChatCompletionChunk]:
        finish = self._generation.finish
        assert finish is not None
        if not self._has_usage_chunk:
            return []
        last = self._chunk([])
        last.usage = answers.usage_of(finish)
        return [last]

    def _message(self, text: str) -> answers.ChatAnswerMessage:
        if self._tool_form is None:
            return answers.ChatAnswerMessage(text)
        parser = ToolCallParser(self._tool_form)
        content, calls = "", list[answers.ToolCall]()
        for part in (*parser.feed(text), *parser.close()):
            if isinstance(part, str):
                content += part
            elif isinstance(part, CallStarted):
                calls.append(answers.ToolCall(part.id, answers.FunctionCall(part.name)))
            else:
                calls[part.index].function.arguments += part.text
        message = answers.ChatAnswerMessage(content if content or not calls else None)
        if calls:
            message.tool_calls = calls
        return message

    def _deltas(self, chunk: Chunk, *, is_last: bool) -> tuple[list[answers.ChatDelta], bool]:
        """What the chunk adds, and whether its choice has called a tool so far."""
        told = bool(told_logprobs(chunk)) and self._has_logprobs
        if self._tool_form is None:
            return ([answers.ChatDelta(content=chunk.text)] if chunk.text or told else []), False
        parser = self._parsers.setdefault(chunk.index, ToolCallParser(self._tool_form))
        parts = parser.feed(chunk.text) + (parser.close() if is_last else [])
        deltas = [_delta(part) for part in parts]
        return deltas or ([answers.ChatDelta()] if told else []), parser.num_calls > 0

    def _prompt_logprobs(
        self, positions: Sequence[PositionLogprobs] | None
    ) -> PromptLogprobs | msgspec.UnsetType:
        if self._num_scores is None:
            return msgspec.UNSET
        return prompt_logprobs(positions or (), self._texts, self._num_scores)

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
            service_tier=self._service_tier,
            usage=None if self._has_usage_chunk else msgspec.UNSET,
        )


def _reason(reason: str, *, has_called: bool) -> str:
    return "tool_calls" if has_called and reason == FinishReason.STOP else reason


def _delta(part: Part) -> answers.ChatDelta:
    if isinstance(part, str):
        return answers.ChatDelta(content=part)
    if isinstance(part, CallStarted):
        function = answers.FunctionCall(part.name)
        return answers.ChatDelta(
            tool_calls=[answers.ToolCallDelta(part.index, part.id, "function", function)]
        )
    function = answers.FunctionCall(arguments=part.text)
    return answers.ChatDelta(tool_calls=[answers.ToolCallDelta(part.index, function=function)])
