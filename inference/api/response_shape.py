"""A chat as OpenAI's responses tell it: items one after another, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine_worker.protocol import Chunk, Finish, FinishReason
from inference.api.sse import event
from inference.errors import ApiError
from inference.models_served import ServedModel
from inference.schemas import response_answers as out
from inference.schemas.responses import ResponseRequest
from inference.tool_calls import CallStarted, Part, ToolCallParser, ToolFormat

Event = dict[str, Any]


class ResponseShape:
    """`response` is always what can be told so far."""

    def __init__(self, response: out.ResponseObject, tool_form: ToolFormat | None) -> None:
        self.response = response
        self._parser = ToolCallParser(tool_form) if tool_form is not None else None
        self._sequence_number = -1

    @property
    def is_final(self) -> bool:
        return self.response.status not in ("queued", "in_progress")

    def first_events(self) -> Sequence[Event]:
        return [
            self._event("response.created", response=self._snapshot()),
            self._event("response.in_progress", response=self._snapshot()),
        ]

    def events(self, chunk: Chunk) -> list[Event]:
        events = [told for part in self._parts(chunk) for told in self._part(part)]
        if chunk.finish is not None:
            is_whole = chunk.finish.reason == FinishReason.STOP
            events += self._end_item("completed" if is_whole else "incomplete")
        return events

    def last_event(self, finish: Finish) -> Event:
        self.response.completed_at = int(time.time())
        self.response.usage = out.response_usage(finish)
        if finish.reason == FinishReason.STOP:
            self.response.status = "completed"
        else:
            reason = "max_output_tokens" if finish.reason == FinishReason.LENGTH else finish.reason
            self.response.status, self.response.incomplete_details = "incomplete", {"reason": reason}
        return self._event(f"response.{self.response.status}", response=self._snapshot())

    def failed(self, error: ApiError) -> Event:
        is_cancelled = error.code == "request_cancelled"
        self.response.status = "cancelled" if is_cancelled else "failed"
        if not is_cancelled:
            self.response.error = error.body() | {"code": error.code or "server_error"}
        return self._event("response.failed", response=self._snapshot())

    def _parts(self, chunk: Chunk) -> list[Part]:
        if self._parser is None:
            return [chunk.text] if chunk.text else []
        return self._parser.feed(chunk.text) + (self._parser.close() if chunk.finish is not None else [])

    def _part(self, part: Part) -> Iterator[Event]:
        items = self.response.output
        if isinstance(part, str):
            if not items or not isinstance(items[-1], out.OutputMessage):
                yield from self._begin_message()
            item = items[-1]
            assert isinstance(item, out.OutputMessage)
            item.content[0].text += part
            yield self._item_event("response.output_text.delta", content_index=0, delta=part, logprobs=[])
        elif isinstance(part, CallStarted):
            yield from self._end_item()
            call = out.OutputCall(
                id=self._item_id("fc"), status="in_progress", call_id=part.id, name=part.name, arguments=""
            )
            items.append(call)
            yield self._item_added()
        else:
            item = items[-1]
            assert isinstance(item, out.OutputCall)
            item.arguments += part.text
            yield self._item_event("response.function_call_arguments.delta", delta=part.text)

    def _begin_message(self) -> Iterator[Event]:
        yield from self._end_item()
        message = out.OutputMessage(id=self._item_id("msg"), status="in_progress", content=[])
        self.response.output.append(message)
        yield self._item_added()
        message.content.append(out.OutputTextPart(text=""))
        part = msgspec.to_builtins(message.content[0])
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _end_item(self, status: str = "completed") -> Iterator[Event]:
        if not self.response.output:
            return
        item = self.response.output[-1]
        if isinstance(item, out.OutputMessage):
            text = item.content[0].text
            yield self._item_event("response.output_text.done", content_index=0, text=text, logprobs=[])
            part = msgspec.to_builtins(item.content[0])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            yield self._item_event(
                "response.function_call_arguments.done", name=item.name, arguments=item.arguments
            )
        item.status = status
        index = len(self.response.output) - 1
        yield self._event("response.output_item.done", output_index=index, item=msgspec.to_builtins(item))

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    def _item_added(self) -> Event:
        index = len(self.response.output) - 1
        item = msgspec.to_builtins(self.response.output[index])
        return self._event("response.output_item.added", output_index=index, item=item)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        index = len(self.response.output) - 1
        return self._event(kind, output_index=index, item_id=self.response.output[index].id, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number, **fields}

    def _snapshot(self) -> Any:
        return msgspec.to_builtins(self.response)


def framed(told: Event, _event_id: str = "") -> bytes:
    return event(told, name=told["type"])


def new_response(body: ResponseRequest, response_id: str, model: ServedModel) -> out.ResponseObject:
    """As it is before its first token."""
    sampled = {"temperature": 1.0, "top_p": 1.0} | model.sampling_defaults()
    config = msgspec.to_builtins(body.text) if body.text else {}
    return out.ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=body.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        store=body.store is not False,
        temperature=sampled["temperature"] if body.temperature is None else body.temperature,
        text={"format": config.get("format") or {"type": "text"}, "verbosity": "medium"},
        tool_choice=msgspec.to_builtins(body.tool_choice) if body.tool_choice else "auto",
        tools=msgspec.to_builtins(body.tools) if body.tools else [],
        top_p=sampled["top_p"] if body.top_p is None else body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
