"""From a checked conversation to a running generation, in whose API's words it ever came."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_worker.protocol import Chunk
from inference.models_served import ServedModel
from inference.runtime import Runtime
from inference.schemas.chat import ChatCompletionRequest
from inference.services.choices import end_of
from inference.services.generation import Generation
from inference.services.idempotency import submit_once
from inference.services.overload import refuse_early
from inference.services.prepare import make_chat_grammar, tokenise_chat
from inference.services.submission import Submission
from inference.tool_calls import Part, ToolCallParser, ToolFormat
from tenants.principal import Principal


@dataclass(slots=True)
class Chat:
    generation: Generation
    model: ServedModel
    name: str
    """What the client calls the model."""
    prompt_tokens: int
    tool_form: ToolFormat | None
    """How this model writes tool calls; None: the answer is text alone."""
    _parser: ToolCallParser | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.tool_form is not None:
            self._parser = ToolCallParser(self.tool_form)

    def parts(self, chunk: Chunk) -> list[Part]:
        """What the chunk adds to the only choice: text, and pieces of tool calls."""
        if self._parser is None:
            return [chunk.text] if chunk.text else []
        return self._parser.feed(chunk.text) + (self._parser.close() if end_of(chunk) is not None else [])


async def start_chat(
    runtime: Runtime,
    principal: Principal,
    body: ChatCompletionRequest,
    *,
    endpoint: str,
    request_id: str,
    is_streamed: bool,
    max_tokens_param: str | None = None,
    may_exist: bool = False,
) -> Chat:
    """Raises ApiError: nothing is charged and nothing queued then. `body` is checked already.

    `max_tokens_param`: what the client's API calls that bound, for messages about it.
    """
    model = await runtime.models.get(body.model, tenant_public_id=principal.tenant_public_id, kind="generate")
    if not may_exist:
        refuse_early(runtime, principal, model)
    grammar, tool_form = await make_chat_grammar(runtime.models, model, body)
    prompt = await tokenise_chat(
        runtime.models, model, body.messages, body.chat_template_kwargs, body.active_tools()
    )
    generation = await submit_once(
        runtime,
        principal,
        Submission(
            model=model,
            prompt_token_ids=prompt,
            fields=body,
            requested_tokens=body.requested_tokens,
            max_tokens_param=max_tokens_param or body.max_tokens_param,
            endpoint=endpoint,
            request_id=request_id,
            is_streamed=is_streamed,
            grammar=grammar,
            may_exist=may_exist,
        ),
    )
    return Chat(generation, model, body.model, len(prompt), tool_form)
