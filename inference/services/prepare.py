"""From a parsed request to prompts in token ids, off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from inference.errors import InvalidRequest
from inference.models_served import ModelCatalogue, ServedModel
from inference.prompts import Message
from inference.schemas.chat import ChatMessage

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


def _refuse_hopeless(model: ServedModel, characters: int, param: str) -> None:
    context = model.card.context_length
    if characters > context * _CHARACTERS_PER_TOKEN_MAX:
        raise InvalidRequest(
            f"This model's maximum context length is {context} tokens; a prompt of {characters} characters "
            "can't fit. Shorten it.",
            code="context_length_exceeded",
            param=param,
        )
