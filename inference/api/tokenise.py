"""`POST /v1/tokenize` and `/v1/detokenize`, as vLLM has them: a prompt's exact tokens. They cost nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from django.http import HttpResponse
from msgspec import Meta

from inference.api.endpoint import ApiCall, endpoint
from inference.errors import InvalidRequest
from inference.schemas.chat import ChatCompletionRequest, ChatMessage
from inference.schemas.sampling import TokenId
from inference.schemas.tools import Tool
from inference.services.prepare import text_of_tokens, tokenise_chat, tokenise_prompt
from tenants.principal import Scope


class TokeniseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokeniseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(msgspec.Struct):
    prompt: str


@endpoint("POST", scope=Scope.INFERENCE, body=TokeniseRequest, answer=Tokens, errors=(404,))
async def tokenize(call: ApiCall) -> HttpResponse:
    """The exact tokens of a prompt or of a conversation."""
    body = call.read(TokeniseRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
    models = call.runtime.models
    model = await models.get(body.model, tenant_public_id=call.principal.tenant_public_id)
    if body.messages is None:
        tokens = await tokenise_prompt(models, model, body.prompt or "")
    else:
        chat = ChatCompletionRequest(model=body.model, messages=body.messages, tools=body.tools)
        chat.check()
        kwargs = body.chat_template_kwargs
        tokens = await tokenise_chat(models, model, chat.messages, kwargs, chat.active_tools())
    return call.respond(Tokens(count=len(tokens), max_model_len=model.card.context_length, tokens=tokens))


@endpoint("POST", scope=Scope.INFERENCE, body=DetokeniseRequest, answer=Text, errors=(404,))
async def detokenize(call: ApiCall) -> HttpResponse:
    """The text of tokens."""
    body = call.read(DetokeniseRequest)
    models = call.runtime.models
    model = await models.get(body.model, tenant_public_id=call.principal.tenant_public_id)
    return call.respond(Text(await text_of_tokens(models, model, body.tokens)))
