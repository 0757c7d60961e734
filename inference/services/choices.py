"""The choices of generations, told apart: what each chunk means for the choice it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine_worker.protocol import ChoiceEnd, Chunk, FinishReason, PositionLogprobs


@dataclass(slots=True)
class Choice:
    """One choice as far as it has come."""

    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.logprobs += told_logprobs(chunk)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if (end := end_of(chunk)) is not None:
            self.finish_reason = end.reason


def end_of(chunk: Chunk) -> ChoiceEnd | None:
    """How the chunk's choice ended, in its last chunk."""
    if chunk.choice_end is None and chunk.finish is not None:
        return ChoiceEnd(chunk.finish.reason, chunk.finish.stop_reason)
    return chunk.choice_end


def told_logprobs(chunk: Chunk) -> Sequence[PositionLogprobs]:
    """Those of tokens that are part of the answer: the end token is not."""
    logprobs = chunk.logprobs or []
    end = end_of(chunk)
    is_end_token = (
        end is not None and end.reason == FinishReason.STOP and not isinstance(end.stop_reason, str)
    )
    return logprobs[:-1] if is_end_token else logprobs


def num_logprobs(choices: Iterable[Choice]) -> int:
    """Of all tokens and their alternatives together: what an answer is long by."""
    return sum(
        len(told) * (1 + len(told[0].top))
        for choice in choices
        for told in (choice.logprobs, choice.prompt_logprobs)
        if told
    )


def best_of(choices: Sequence[Choice], n: int) -> Sequence[Choice]:
    """The `n` with the highest log probability per token, best first; where there are no more, all as they are."""
    if len(choices) <= n:
        return choices

    def per_token(choice: Choice) -> float:
        values = [position.chosen.logprob for position in choice.logprobs]
        return sum(values) / len(values) if values else 0.0  # the end came at once, and is not told

    return sorted(choices, key=per_token, reverse=True)[:n]
