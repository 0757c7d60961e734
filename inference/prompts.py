"""Text to token ids at the gateway: the model's own chat template, sandboxed, and its own tokenizer.

Imports neither torch nor transformers; both are what `transformers.apply_chat_template` does, and a
test holds the ids equal. What a message says never becomes a control token of the template: see
`PromptRenderer.chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine_worker.protocol import ModelCard
from inference.errors import InvalidRequest
from inference.token_texts import TokenTexts

_PRIVATE_USE = range(0xF700, 0xF8FF)
"""Code points from which two are borrowed to mark where a message's text begins and ends."""
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
    """What a template finds beside: `tool_calls`, `tool_call_id`, `name`."""

    def for_template(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.more}


class PromptRenderer:
    """Renders and tokenises for one model. Thread-safe; slow enough to belong in a thread."""

    def __init__(self, card: ModelCard, tokenizer_json: bytes) -> None:
        self.card = card
        self._tokenizer_json = tokenizer_json
        self._tokenizer = _tokenizer(tokenizer_json)
        self._template = None
        if card.chat_template:
            self._template = _environment().from_string(card.chat_template)
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
        turn and speak as somebody else. Such a conversation is tokenised in pieces: the template's
        control tokens are found outside the messages only, everything else is encoded as plain text.

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
        unused = (chr(point) for point in _PRIVATE_USE if chr(point) not in texts)
        try:
            start, end = next(unused), next(unused)
        except StopIteration:
            raise InvalidRequest(
                "The messages use every private-use character: leave some out.", param="messages"
            ) from None
        marked = _marked(list(messages), start, end)
        rendered = self._render(marked, template_kwargs, _marked(list(tools), start, end))
        ids: list[int] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                ids.extend(_ids(self._plain_tokenizer, "".join(plain)))
                plain.clear()

        # Odd parts are what messages say, even ones are the template's own words.
        for index, part in enumerate(re.split(f"[{start}{end}]", rendered)):
            at = 0
            if index % 2 == 0:
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
            raise InvalidRequest(
                f"The model '{self.card.model}' has no chat template: use /v1/completions.", param="model"
            )
        try:
            return self._template.render(
                **{
                    **template_kwargs,
                    "messages": messages,
                    **({"tools": tools} if tools else {}),
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


def _is_structure(key: str, value: str) -> bool:
    """Words by which a template tells messages apart. No control token is letters alone."""
    return key in ("role", "type") and value.isalpha()


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """Everything in messages and tools that a client wrote."""
    if isinstance(value, str) and not _is_structure(key, value):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _texts(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _marked(value: Any, start: str, end: str, key: str = "") -> Any:
    """The same with every text that holds something between the marks; keys of what a client made included."""
    if isinstance(value, str):
        return value if _is_structure(key, value) else f"{start}{value}{end}"
    if isinstance(value, dict):
        return {
            name if name in _KNOWN_KEYS else f"{start}{name}{end}": _marked(inner, start, end, name)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_marked(inner, start, end) for inner in value]
    return value


_KNOWN_KEYS = frozenset(
    {"role", "content", "type", "function", "name", "arguments", "parameters", "description", "strict"}
    | {"tool_calls", "tool_call_id", "id"}
)


def _environment() -> ImmutableSandboxedEnvironment:
    """As in transformers: what templates on the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
