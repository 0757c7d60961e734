"""A request for several choices: one sequence each in the engine, one answer, one end, one row of usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from engine_worker.engine.types import EngineRequest
from engine_worker.protocol import ChoiceEnd, Chunk, Finish, FinishReason

_WORST_FIRST: Final = (
    FinishReason.ERROR,
    FinishReason.DEADLINE,
    FinishReason.CANCELLED,
    FinishReason.LENGTH,
    FinishReason.STOP,
)
_GOLDEN_RATIO: Final = 0x9E3779B97F4A7C15


def choice_seed(seed: int, index: int) -> int:
    """The first choice is what the request would give alone; the others' seeds follow from it."""
    return (seed + index * _GOLDEN_RATIO) % 2**63


def expand(request: EngineRequest, log: Sequence[Chunk]) -> list[EngineRequest]:
    """The choices that have not ended, each going on from what earlier attempts logged of it."""
    n = request.sampling.n
    if n == 1:
        return [request]
    ended = ended_choices(log)
    return [
        replace(
            request,
            request_id=choice_id(request.request_id, index),
            sampling=msgspec.structs.replace(
                request.sampling,
                n=1,
                seed=choice_seed(request.sampling.seed, index),
                prompt_logprobs=request.sampling.prompt_logprobs if index == 0 else None,
            ),
            resumed_token_ids=[token for chunk in log if chunk.index == index for token in chunk.token_ids],
        )
        for index in range(n)
        if index not in ended
    ]


def choice_id(engine_id: str, index: int) -> str:
    """The engine's id of one of several choices."""
    return f"{engine_id}/{index}"


def ended_choices(log: Iterable[Chunk]) -> dict[int, ChoiceEnd]:
    return {chunk.index: chunk.choice_end for chunk in log if chunk.choice_end is not None}


def joint_finish(ends: Iterable[ChoiceEnd], finishes: Sequence[Finish], completion_tokens: int) -> Finish:
    """The end of all choices: the worst of their reasons, the prompt counted once.

    `finishes`: of the choices that this attempt ran, in the order in which they ended.
    """
    reasons = {end.reason for end in ends}
    first = max(finishes, key=lambda finish: finish.prompt_tokens - finish.cached_tokens)
    return Finish(
        reason=next(reason for reason in _WORST_FIRST if reason in reasons),
        prompt_tokens=first.prompt_tokens,
        completion_tokens=completion_tokens,
        # Of the choice that computed most of the prompt: the others found what it left.
        cached_tokens=first.cached_tokens,
        drafted_tokens=sum(finish.drafted_tokens for finish in finishes),
        accepted_tokens=sum(finish.accepted_tokens for finish in finishes),
        error=next((finish.error for finish in finishes if finish.error), None),
    )
