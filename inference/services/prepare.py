"""From a parsed request to prompts in token ids, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from inference import grammars
from inference.errors import InvalidRequest
from inference.models_served import ModelCatalogue, ServedModel
from inference.prompts import Message
from inference.schemas.chat import ChatMessage
from inference.schemas.structured import StructuredFields

_CHARACTERS_PER_TOKEN_MAX = 64
"""No tokenizer makes longer tokens of ordinary text: what is longer than this per token of context can't fit,
and is not worth tokenising."""


async def tokenise_chat(
    catalogue: ModelCatalogue,
    model: ServedModel,
    messages: list[ChatMessage],
    template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """int[num_prompt_tokens]. Raises InvalidRequest."""
    conversation = [Message(message.role, message.text()) for message in messages]
    _refuse_hopeless(model, sum(len(message.content) for message in conversation), "messages")
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        catalogue.executor, model.renderer.chat, conversation, template_kwargs or {}
    )


async def tokenise_prompt(
    catalogue: ModelCatalogue, model: ServedModel, prompt: str | list[int]
) -> list[int]:
    """int[num_prompt_tokens]. Ids are checked against the vocabulary. Raises InvalidRequest."""
    if isinstance(prompt, list):
        for token_id in prompt:
            if token_id >= model.card.vocab_size:
                raise InvalidRequest(
                    f"'prompt' holds token {token_id}, but this model's vocabulary ends at "
                    f"{model.card.vocab_size - 1}.",
                    param="prompt",
                )
        return prompt
    _refuse_hopeless(model, len(prompt), "prompt")
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(catalogue.executor, model.renderer.text, prompt)


async def make_grammar(catalogue: ModelCatalogue, fields: StructuredFields) -> str:
    """The grammar that the answer must follow; empty: none. Raises InvalidRequest."""
    forms = fields.forms()
    if not forms:
        return ""
    if len(forms) > 1:
        raise InvalidRequest(
            f"Only one of {' and '.join(forms)} can be followed at once.", param=next(iter(forms))
        )
    ((param, (kind, value)),) = forms.items()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(catalogue.executor, partial(_MAKERS[kind], value, param=param))


_MAKERS: Final[dict[str, Callable[..., str]]] = {
    "json": grammars.json_schema_grammar,
    "json_object": lambda _, param: grammars.json_schema_grammar({"type": "object"}, param=param),
    "regex": grammars.regex_grammar,
    "choice": grammars.choice_grammar,
    "grammar": grammars.text_grammar,
}


def _refuse_hopeless(model: ServedModel, characters: int, param: str) -> None:
    context = model.card.context_length
    if characters > context * _CHARACTERS_PER_TOKEN_MAX:
        raise InvalidRequest(
            f"This model's maximum context length is {context} tokens; a prompt of {characters} characters "
            "can't fit. Shorten it.",
            code="context_length_exceeded",
            param=param,
        )
