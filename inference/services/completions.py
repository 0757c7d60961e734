"""From checked prompts to running generations, one for each: all of them or none."""

from __future__ import annotations

from dataclasses import dataclass

from inference.models_served import ServedModel
from inference.runtime import Runtime
from inference.schemas.completions import CompletionRequest
from inference.services.generation import Generation
from inference.services.idempotency import submit_once
from inference.services.overload import refuse_early
from inference.services.prepare import echoes_of, make_grammar, tokenise_prompts
from inference.services.submission import Submission
from tenants.principal import Principal


@dataclass(frozen=True, slots=True)
class Prompted:
    model: ServedModel
    prompts: list[list[int]]
    echoes: list[str]
    """What is told before each prompt's answers."""
    generations: list[Generation]


async def start_completions(
    runtime: Runtime,
    principal: Principal,
    body: CompletionRequest,
    *,
    endpoint: str,
    request_id: str,
    is_streamed: bool,
    may_exist: bool = False,
) -> Prompted:
    """Raises ApiError: nothing is charged and nothing queued then. `body` is checked already."""
    model = await runtime.models.get(body.model, tenant_public_id=principal.tenant_public_id, kind="generate")
    if not may_exist:
        refuse_early(runtime, principal, model)
    asked_for = body.prompts()
    prompts = await tokenise_prompts(runtime.models, model, asked_for)
    echoes = await echoes_of(runtime.models, model, asked_for) if body.echo else [""] * len(prompts)
    grammar = await make_grammar(runtime.models, body)
    generations: list[Generation] = []
    try:
        for index, prompt in enumerate(prompts):
            asked = Submission(
                model=model,
                prompt_token_ids=prompt,
                fields=body,
                requested_tokens=body.requested_tokens,
                max_tokens_param="max_tokens",
                continues_text=True,
                endpoint=endpoint,
                is_streamed=is_streamed,
                grammar=grammar,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                may_exist=may_exist,
            )
            generations.append(await submit_once(runtime, principal, asked))
    except BaseException:
        # What was admitted before the refusal is given back.
        for generation in generations:
            generation.leave()
        raise
    return Prompted(model, prompts, echoes, generations)
