"""Text to token ids at the gateway: the model's own chat template, sandboxed, and its own tokenizer.

Imports neither torch nor transformers; both are what `transformers.apply_chat_template` does, and a
test holds the ids equal. What a message says never becomes a control token of the template: see
`PromptRenderer.chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


class PromptRenderer:
    """Renders and tokenises for one model. Thread-safe; slow enough to belong in a thread."""

    def __init__(self, card: ModelCard, tokenizer_json: bytes) -> None:
        self.card = card
        self._tokenizer_json = tokenizer_json
        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._template = None
        if card.chat_template:
            self._template = _environment().from_string(card.chat_template)
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
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer)

    def chat(self, messages: Sequence[Message], template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        A message that contains the text of a control token (`<|im_end|>`) could otherwise end its own
        turn and speak as somebody else. Such a conversation is tokenised in pieces: the template's
        control tokens are found outside the messages only, everything else is encoded as plain text.

        Raises InvalidRequest: the model has no template, or its template refuses the conversation.
        """
        if self._control_ids and any(self._control.search(message.content) for message in messages):
            return self._guarded_chat(messages, template_kwargs or {})
        rendered = self._render(messages, template_kwargs or {})
        return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)

    def _guarded_chat(self, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> list[int]:
        texts = "".join(message.content for message in messages)
        unused = (chr(point) for point in _PRIVATE_USE if chr(point) not in texts)
        try:
            start, end = next(unused), next(unused)
        except StopIteration:
            raise InvalidRequest("The messages use every private-use character.", param="messages") from None
        marked = [Message(message.role, f"{start}{message.content}{end}") for message in messages]
        rendered = self._render(marked, template_kwargs)
        ids: list[int] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                ids.extend(self._plain_tokenizer.encode("".join(plain), add_special_tokens=False).ids)
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
        tokenizer: Tokenizer = Tokenizer.from_buffer(self._tokenizer_json)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _render(self, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> str:
        if self._template is None:
            raise InvalidRequest(
                f"The model '{self.card.model}' has no chat template: use /v1/completions.", param="model"
            )
        try:
            return self._template.render(
                **{
                    **template_kwargs,
                    "messages": [{"role": each.role, "content": each.content} for each in messages],
                    "add_generation_prompt": True,
                    "bos_token": self.card.bos_token or "",
                    "eos_token": self.card.eos_token or "",
                }
            )
        except (TemplateError, SecurityError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {str(error)[:200]}", param="messages"
            ) from error


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
