"""Text to token ids at the gateway: the model's own chat template, sandboxed, and its own tokenizer.

Imports neither torch nor transformers; both are what `transformers.apply_chat_template` does, and a
test holds the ids equal. What a message says never becomes a control token of the template: see
`PromptRenderer.chat`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final

import structlog
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine_worker.protocol import ModelCard
from inference.errors import InvalidRequest
from inference.token_texts import TokenTexts

log = structlog.get_logger(__name__)

_PRIVATE_USE = range(0xF700, 0xF8FF)
"""Code points from which one is borrowed to mark the control tokens that messages name."""
_OWN_KWARGS: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
    | {"chat_template", "tokenize"}
)
"""What `transformers.apply_chat_template` takes beside a template's own variables, or gives to it."""
_HELD_CHARACTERS: Final = 2000
"""So long a text is tokenised in half a millisecond, in which nothing else runs."""
_TEXTS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    more: dict[str, Any] = field(default_factory=dict)
    """What a template finds beside: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`."""

    def for_template(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.more}

    def characters(self) -> int:
        return len(self.content) + sum(map(len, _texts(self.more)))


class PromptRenderer:
    """Renders and tokenises for one model. Thread-safe; slow enough to belong in a thread."""

    def __init__(self, card: ModelCard, tokenizer_json: bytes) -> None:
        self.card = card
        self._tokenizer_json = tokenizer_json
        self._tokenizer = _tokenizer(tokenizer_json)
        self._template, self._lacks = None, f"The model '{card.model}' has no chat template"
        if card.chat_template:
            try:
                self._template = _environment().from_string(card.chat_template)
            except TemplateSyntaxError as error:
                self._lacks = (
                    f"The chat template of '{card.model}' is wrong in line {error.lineno}: {error.message}"
                )
                log.warning(
                    "chat_template_unreadable", model=card.model, line=error.lineno, error=error.message
                )
            else:
                # As one dictionary: the chain of them that Jinja keeps costs more to read than a short chat to render.
                self._template.globals = dict(self._template.globals)
        control = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._control_ids = control
        self._control = re.compile(
            "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True))
        )

    def text(self, text: str) -> list[int]:
        """Ids of a plain prompt, with what the tokenizer itself adds (a BOS, for some models)."""
        return _ids(self._tokenizer, text, add_special_tokens=True)

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Of several, as `text`."""
        return [
            list(encoding.ids)
            for start in range(0, len(texts), _TEXTS_AT_ONCE)
            for encoding in self._tokenizer.encode_batch_fast(list(texts[start : start + _TEXTS_AT_ONCE]))
        ]

    def decode(self, token_ids: Sequence[int]) -> str:
        # As a batch, for the same reason as in `_ids`.
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return str(text)

    @cached_property
    def added_tokens(self) -> list[str]:
        """Texts that are a token of their own beside the vocabulary's pieces."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer, self._tokenizer_json)

    def chat(
        self,
        messages: Sequence[Message],
        template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        A message that contains the text of a control token (`<|im_end|>`) could otherwise end its own
        turn and speak as somebody else. Such a conversation is tokenised in pieces: the template gets that
        token's number in place of its text, whatever it cuts and joins; what it then holds of control tokens is its
        own, and everything else is encoded as plain text.

        Raises InvalidRequest: the model has no template, its template refuses the conversation, or
        `template_kwargs` names what is decided here.
        """
        if own := sorted(_OWN_KWARGS.intersection(template_kwargs or ())):
            raise InvalidRequest(
                f"'chat_template_kwargs' can't set '{own[0]}', which is not the template's choice, but Weir's: leave "
                "it out.",
                param=f"chat_template_kwargs.{own[0]}",
            )
        said = [message.for_template() for message in messages]
        if "[TOOL_CALLS]" in (self.card.chat_template or ""):
            said = [_with_short_ids(message) for message in said]
        if self._control_ids and any(self._control.search(text) for text in _texts([said, tools])):
            return self._guarded_chat(said, template_kwargs or {}, tools)
        rendered = self._render(said, template_kwargs or {}, tools)
        return _ids(self._tokenizer, rendered)

    def _guarded_chat(
        self,
        messages: Sequence[dict[str, Any]],
        template_kwargs: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        texts = "".join(_texts([messages, tools]))
        mark = next((chr(point) for point in _PRIVATE_USE if chr(point) not in texts), None)
        if mark is None:
            raise InvalidRequest(
                "The messages use every private-use character: leave some out.", param="messages"
            )

        def quoted(text: str) -> str:
            return self._control.sub(lambda match: f"{mark}{self._control_ids[match[0]]}{mark}", text)

        rendered = self._render(
            _with_texts(list(messages), quoted), template_kwargs, _with_texts(list(tools), quoted)
        )
        said = {token_id: text for text, token_id in self._control_ids.items()}
        ids: list[int] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                ids.extend(_ids(self._plain_tokenizer, "".join(plain)))
                plain.clear()

        # Odd parts are the tokens that messages name; those that are in even ones the template wrote itself.
        for index, part in enumerate(re.split(f"{mark}([0-9]+){mark}", rendered)):
            if index % 2 == 1:
                plain.append(said[int(part)])
                continue
            at = 0
            for match in self._control.finditer(part):
                plain.append(part[at : match.start()])
                flush()
                ids.append(self._control_ids[match[0]])
                at = match.end()
            plain.append(part[at:])
        flush()
        return ids

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """A second one, because how it treats control tokens is a property of the object."""
        tokenizer = _tokenizer(self._tokenizer_json)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        template_kwargs: dict[str, Any],
        tools: Sequence[dict[str, Any]],
    ) -> str:
        if self._template is None:
            raise InvalidRequest(f"{self._lacks}: use /v1/completions.", param="model")
        try:
            return self._template.render(
                **{
                    "documents": None,
                    **template_kwargs,
                    "messages": messages,
                    # As `documents` None, not undefined, as in transformers: templates ask for either.
                    "tools": tools or None,
                    "add_generation_prompt": True,
                    "bos_token": self.card.bos_token or "",
                    "eos_token": self.card.eos_token or "",
                }
            )
        except (TemplateError, SecurityError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {str(error)[:200]}", param="messages"
            ) from error


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    if len(text) <= _HELD_CHARACTERS:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    # A batch, though of one: only then the library lets other threads run, among them the one of the event loop.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Without what some files ask for: what is too long is refused, never cut, and nothing is padded."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _texts(value: Any) -> Iterator[str]:
    """Everything in messages and tools that is text, names of what a client made included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same with each of `_texts` changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _with_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_texts(inner, change) for inner in value]
    return value


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The same with ids of tool calls of nine letters and digits, as Mistral's templates demand; a call and its answer
    keep one id. Source: mistral-common, `ToolCall.id`."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]
    return changed


def _short_id(call_id: str) -> str:
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", call_id)
    return call_id if is_short else hashlib.sha256(call_id.encode()).hexdigest()[:9]


class _Generation(Extension):
    """`{% generation %}`, by which templates say what the assistant said, for training: its body, and nothing else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """As in transformers: what templates on the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
