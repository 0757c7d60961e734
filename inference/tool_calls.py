"""How models write tool calls: the grammar that forces one, and the text taken apart into calls.

Which way a model writes is told by its chat template. Tagged, as Hermes, Qwen and many others:

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Bare, as Llama 3 and Mistral: the whole answer is one such object, or a list of them, or several one after the other.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from llguidance import LLMatcher

from inference.errors import InvalidRequest
from inference.grammars import WHITESPACE, checked, json_schema_grammar
from inference.schemas.tools import Tool

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


_BETWEEN: Final = " \t\r\n;,"
_DECODER: Final = json.JSONDecoder()


class Style(Enum):
    TAGGED = "tagged"
    BARE = "bare"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    style: Style
    key: str
    """Of the arguments."""


def tool_format(chat_template: str | None) -> ToolFormat:
    """Raises InvalidRequest for a template that knows no tools."""
    if chat_template is None or "tools" not in chat_template:
        raise InvalidRequest(
            "This model's chat template takes no tools: leave 'tools' out, or use a model whose template takes them.",
            param="tools",
        )
    if _BEGIN in chat_template:
        return ToolFormat(Style.TAGGED, "arguments")
    is_llama = '"parameters"' in chat_template and "[TOOL_CALLS]" not in chat_template
    return ToolFormat(Style.BARE, "parameters" if is_llama else "arguments")


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    many: bool,
    control: Sequence[str],
    answer: dict[str, Any] | None = None,
) -> str:
    """Forces one call of `tools`, or with `many` one or more. Raises InvalidRequest for a bad schema.

    With `answer`, a JSON schema, what follows that may come instead. `control`: texts that are a token of their own,
    which a grammar has to name as such.
    """
    if answer is not None and form.style is Style.BARE:
        # Calls are JSON as the answer is: only one schema for both can tell them apart.
        return json_schema_grammar(_call_or_answer(form, tools, many=many, answer=answer), param="tools")
    rules = []
    for at, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "{form.key}": ')
        call = f'{head} {_json(tool.function.parameters or {"type": "object"})} "}}"'
        if form.style is Style.TAGGED:
            begin, end = (tag if tag in control else json.dumps(tag) for tag in (_BEGIN, _END))
            call = f'{begin} "\\n" {call} "\\n" {end}'
        rules.append(f"call{at}: {call}")
    either = " | ".join(f"call{at}" for at in range(len(tools)))
    separator = '"\\n"' if form.style is Style.TAGGED else '", "'
    start = f"call ({separator} call)*" if many else "call"
    if form.style is Style.BARE and many:
        start = f'call | "[" {start} "]"'
    if answer is not None:
        start += " | answer"
        rules.append(f"answer: {_json(answer)}")
    grammar = "\n".join([f"start: {start}", f"call: {either}", *rules])
    return checked(LLMatcher.grammar_from_lark(grammar), param="tools")


def _call_or_answer(
    form: ToolFormat, tools: Sequence[Tool], *, many: bool, answer: dict[str, Any]
) -> dict[str, Any]:
    defs = {"answer": _moved(answer, "#/$defs/answer")}
    calls = []
    for at, tool in enumerate(tools):
        defs[f"tool{at}"] = _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/tool{at}")
        properties = {"name": {"const": tool.function.name}, form.key: {"$ref": f"#/$defs/tool{at}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    defs["call"] = {"anyOf": calls}
    either: list[dict[str, Any]] = [{"$ref": "#/$defs/answer"}, {"$ref": "#/$defs/call"}]
    if many:
        either.append({"type": "array", "items": {"$ref": "#/$defs/call"}, "minItems": 1})
    return {"anyOf": either, "$defs": defs}


def _moved(schema: Any, to: str) -> Any:
    """The schema, as it is where it is no longer the whole document."""
    if isinstance(schema, list):
        return [_moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: to + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, to)
        for name, value in schema.items()
    }


def _json(schema: dict[str, Any]) -> str:
    """In Lark's words."""
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


@dataclass(slots=True)
class CallStarted:
    index: int
    id: str
    name: str


@dataclass(slots=True)
class ArgumentsText:
    index: int
    text: str


Part = str | CallStarted | ArgumentsText
"""Of an answer: ordinary text, or a piece of a call."""


@dataclass(slots=True)
class ToolCallParser:
    """Takes an answer apart while it comes. What turns out not to be a call is ordinary text."""

    form: ToolFormat
    num_calls: int = 0
    _state: str = "text"
    _buffer: str = ""
    _json: _JsonEnd = field(default_factory=lambda: _JsonEnd())

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        if self.form.style is Style.BARE:
            return self._feed_bare()
        parts: list[Part] = []
        steps = {"text": self._text, "head": self._head, "arguments": self._arguments, "tail": self._tail}
        while steps[self._state](parts):
            pass
        return parts

    def close(self) -> list[Part]:
        """No text will follow."""
        text, self._buffer = self._buffer, ""
        if self.form.style is Style.BARE and self._state == "held":
            return self._whole(text) or [text]
        if self._state == "head":
            return [_BEGIN + text]
        return [text] if text and self._state in ("text", "plain") else []

    # -- tagged: each step returns whether another one may get further

    def _text(self, parts: list[Part]) -> bool:
        if self.num_calls:
            self._buffer = self._buffer.lstrip()  # between calls
        before, tag, after = self._buffer.partition(_BEGIN)
        if tag:
            if text := before.rstrip():
                parts.append(text)
            self._buffer, self._state = after, "head"
            return True
        held = next(
            (n for n in range(min(len(_BEGIN) - 1, len(before)), 0, -1) if _BEGIN.startswith(before[-n:])), 0
        )
        # White space before a call is no answer: it waits to see what follows.
        if ready := before[: len(before) - held].rstrip():
            parts.append(ready)
            self._buffer = before[len(ready) :]
        return False

    def _head(self, parts: list[Part]) -> bool:
        if match := _HEAD.match(self._buffer):
            parts.append(self._start(json.loads(f'"{match[1]}"')))
            self._buffer, self._json, self._state = self._buffer[match.end() :], _JsonEnd(), "arguments"
            return True
        body, tag, after = self._buffer.partition(_END)
        if not tag:
            return False
        parts += self._whole(body) or [_BEGIN + body + _END]
        self._buffer, self._state = after, "text"
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        end = self._json.find(self._buffer)
        text = self._buffer if end is None else self._buffer[:end]
        if text:
            parts.append(ArgumentsText(self.num_calls - 1, text))
        self._buffer = self._buffer[len(text) :]
        if end is None:
            return False
        self._state = "tail"
        return True

    def _tail(self, parts: list[Part]) -> bool:
        _, tag, after = self._buffer.partition(_END)
        if tag:
            self._buffer, self._state = after, "text"
        return bool(tag)

    # -- bare

    def _feed_bare(self) -> list[Part]:
        if self._state == "text" and (begun := self._buffer.lstrip()):
            self._state = "held" if begun[0] in "{[" else "plain"
        if self._state != "plain":
            return []
        text, self._buffer = self._buffer, ""
        return [text] if text else []

    def _whole(self, text: str) -> list[Part]:
        """The calls in a JSON text, or in several; none if it is something else."""
        try:
            found = [(call["name"], _arguments_of(call)) for call in _values(text)]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []
        parts: list[Part] = []
        for name, arguments in found:
            parts += [self._start(str(name)), ArgumentsText(self.num_calls - 1, arguments)]
        return parts

    def _start(self, name: str) -> CallStarted:
        self.num_calls += 1
        return CallStarted(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)


@dataclass(slots=True)
class _JsonEnd:
    """Finds the end of one JSON object that comes in pieces."""

    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False

    def find(self, text: str) -> int | None:
        """Index after the object's last character, or None if `text` does not hold it."""
        for at, char in enumerate(text):
            if self.in_string:
                if self.is_escaped:
                    self.is_escaped = False
                elif char == "\\":
                    self.is_escaped = True
                elif char == '"':
                    self.in_string = False
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return at + 1
        return None


def _values(text: str) -> list[Any]:
    """What JSON texts hold that follow each other, as Llama 3 writes several calls; of a list, its items."""
    found: list[Any] = []
    rest = text.lstrip()
    while rest:
        value, end = _DECODER.raw_decode(rest)
        found += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(_BETWEEN)
    return found


def _arguments_of(call: dict[str, Any]) -> str:
    arguments = call["arguments"] if "arguments" in call else call["parameters"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
