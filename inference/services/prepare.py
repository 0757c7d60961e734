"""From a parsed request to prompts in token ids, off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from inference import grammars
from inference.errors import InvalidRequest
from inference.models_served import ModelCatalogue, ServedModel
from inference.prompts import Message
from inference.schemas.chat import ChatCompletionRequest, ChatMessage
from inference.schemas.structured import StructuredFields
from inference.schemas.tools import NamedTool, Tool, ToolCallMade
from inference.tool_calls import ToolFormat, call_grammar, tool_format
from tenants.counting import counted

_Made = TypeVar("_Made")
_CHARACTERS_PER_TOKEN_MAX = 64
"""No tokenizer makes longer tokens of ordinary text: what is longer than this per token of context can't fit,
and is not worth tokenising."""
_SHORT_CHARACTERS = 2000
"""So long a prompt is rendered and tokenised on the event loop: about half a millisecond."""


async def tokenise_chat(
    catalogue: ModelCatalogue,
    model: ServedModel,
    messages: list[ChatMessage],
    template_kwargs: dict[str, Any] | None,
    tools: list[Tool] | None = None,
) -> list[int]:
    """int[num_prompt_tokens]. Raises InvalidRequest."""
    conversation = [_message(message) for message in messages]
    size = sum(message.characters() for message in conversation)

    def make() -> list[int]:
        given = [msgspec.to_builtins(tool) for tool in tools or ()]
        _refuse_hopeless(model, size + (len(str(given)) if given else 0), "messages")
        return model.renderer.chat(conversation, template_kwargs or {}, given)

    return await _off_loop_if_long(catalogue, make, _SHORT_CHARACTERS + 1 if tools else size)


async def _off_loop_if_long(catalogue: ModelCatalogue, make: Callable[[], _Made], characters: int) -> _Made:
    """What is short takes less time than a thread's turn does."""
    if characters <= _SHORT_CHARACTERS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(catalogue.executor, make)


async def text_of_tokens(catalogue: ModelCatalogue, model: ServedModel, token_ids: list[int]) -> str:
    """Raises InvalidRequest where one is not in the vocabulary."""
    _check_prompt(model, token_ids, "tokens")
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(catalogue.executor, model.renderer.decode, token_ids)


def _message(message: ChatMessage) -> Message:
    more: dict[str, Any] = {}
    if message.tool_calls:
        more["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        more["tool_call_id"] = message.tool_call_id
    if message.name:
        more["name"] = message.name
    if thoughts := message.reasoning_content or message.reasoning:
        more["reasoning_content"] = thoughts
    return Message(message.role, message.text(), more)


def _tool_call(call: ToolCallMade) -> dict[str, Any]:
    """With the arguments as templates on the hub expect them: an object, not its text."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


async def make_chat_grammar(
    catalogue: ModelCatalogue, model: ServedModel, body: ChatCompletionRequest
) -> tuple[str, ToolFormat | None]:
    """The grammar of a chat's answer, and how its tool calls are written, where there are tools."""
    tools = body.active_tools()
    if not tools:
        return await make_grammar(catalogue, body), None
    form = tool_format(model.card.chat_template)
    answer = await _answer_schema(catalogue, body)
    forced = body.forced_tools()
    if not forced and answer is None:
        return "", form
    many = not isinstance(body.tool_choice, NamedTool) and body.parallel_tool_calls is not False
    make = partial(
        call_grammar,
        form,
        forced or tools,
        many=many,
        control=model.renderer.added_tokens,
        # A call that is forced leaves no answer to have a form.
        answer=None if forced else answer,
    )
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(catalogue.executor, make), form


async def _answer_schema(catalogue: ModelCatalogue, body: ChatCompletionRequest) -> dict[str, Any] | None:
    """Of an answer that may come instead of a call; None: any. Raises InvalidRequest."""
    forms = body.forms()
    if not forms:
        return None
    await make_grammar(catalogue, body)  # says what is wrong with it by itself
    ((param, (kind, value)),) = forms.items()
    if kind not in ("json", "json_object"):
        raise InvalidRequest(
            f"Only a JSON form and tools can be combined, but not '{param}': leave one out, or set 'tool_choice' "
            "to 'none'.",
            param=param,
        )
    schema: dict[str, Any] = value if kind == "json" else {"type": "object"}
    return schema


async def tokenise_prompt(
    catalogue: ModelCatalogue, model: ServedModel, prompt: str | list[int]
) -> list[int]:
    """int[num_prompt_tokens]. Ids are checked against the vocabulary. Raises InvalidRequest."""
    (ids,) = await tokenise_prompts(catalogue, model, [prompt])
    return ids


async def tokenise_prompts(
    catalogue: ModelCatalogue, model: ServedModel, prompts: list[str | list[int]]
) -> list[list[int]]:
    """The same of several: many short ones take long together. Raises InvalidRequest."""

    def make() -> list[list[int]]:
        for prompt in prompts:
            _check_prompt(model, prompt, "prompt")
        return [prompt if isinstance(prompt, list) else model.renderer.text(prompt) for prompt in prompts]

    return await _off_loop_if_long(catalogue, make, sum(map(len, prompts)))


async def echoes_of(
    catalogue: ModelCatalogue, model: ServedModel, prompts: list[str | list[int]]
) -> list[str]:
    """Each as text, to be told before its answer."""

    def make() -> list[str]:
        return [prompt if isinstance(prompt, str) else model.renderer.decode(prompt) for prompt in prompts]

    ids = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
    return await _off_loop_if_long(catalogue, make, ids)


async def tokenise_texts(
    catalogue: ModelCatalogue, model: ServedModel, texts: list[str | list[int]]
) -> list[list[int]]:
    """Texts to be embedded, each with the tokens that the tokenizer adds to it. Raises InvalidRequest."""
    make = partial(_texts_to_ids, model, texts)
    ids = await asyncio.get_running_loop().run_in_executor(catalogue.executor, make)
    longest = max(range(len(ids)), key=lambda index: len(ids[index]))
    if len(ids[longest]) > model.card.context_length:
        raise InvalidRequest(
            f"This model's maximum context length is {counted(model.card.context_length, 'token')}, but input "
            f"{longest} has {len(ids[longest])}. Shorten it.",
            code="context_length_exceeded",
            param="input",
        )
    return ids


def _texts_to_ids(model: ServedModel, texts: list[str | list[int]]) -> list[list[int]]:
    for text in texts:
        _check_prompt(model, text, "input")
    tokenised = iter(model.renderer.texts([text for text in texts if isinstance(text, str)]))
    return [text if isinstance(text, list) else next(tokenised) for text in texts]


def _check_prompt(model: ServedModel, prompt: str | list[int], param: str) -> None:
    if isinstance(prompt, str):
        _refuse_hopeless(model, len(prompt), param)
        return
    if (largest := max(prompt, default=0)) >= model.card.vocab_size:
        raise InvalidRequest(
            f"'{param}' holds token {largest}, but this model's ids must be from 0 to {model.card.vocab_size - 1}.",
            param=param,
        )


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
            f"This model's maximum context length is {counted(context, 'token')}; a prompt of {characters} characters "
            "can't fit. Shorten it.",
            code="context_length_exceeded",
            param=param,
        )
