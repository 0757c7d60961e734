"""Log probabilities in OpenAI's two shapes. They are the model's own, before temperature and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from engine_worker.protocol import PositionLogprobs, TokenLogprob
from inference.token_texts import TokenTexts

_LEAST: Final = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that can't come."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobEntry]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Of `/v1/completions`: parallel lists. The first token of an echoed prompt has no probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""As vLLM has them: by token id, the prompt's own token first; null for its first one."""


def prompt_logprobs(positions: Sequence[PositionLogprobs], texts: TokenTexts, count: int) -> PromptLogprobs:
    """`count`: so many of the likeliest beside each token."""

    def entry(candidate: TokenLogprob, rank: int | None) -> PromptLogprob:
        return PromptLogprob(max(candidate.logprob, _LEAST), rank, texts.text_of(candidate.token_id))

    told: PromptLogprobs = [None]
    for position in positions:
        found = {str(position.chosen.token_id): entry(position.chosen, position.rank)}
        for rank, candidate in enumerate(position.top[:count], 1):
            found.setdefault(str(candidate.token_id), entry(candidate, rank))
        told.append(found)
    return told


def chat_logprobs(positions: Sequence[PositionLogprobs], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs([_entry(position, texts) for position in positions])


def text_logprobs(
    positions: Sequence[PositionLogprobs], texts: TokenTexts, *, offset: int, first_token: int | None = None
) -> TextLogprobs:
    """`offset`: characters before the first of these tokens; `first_token`: an echoed prompt's first."""
    result = TextLogprobs()
    if first_token is not None:
        _append(result, texts.text_of(first_token), None, None, offset)
        offset += len(result.tokens[0])
    for position in positions:
        token = texts.text_of(position.chosen.token_id)
        top = {texts.text_of(each.token_id): each.logprob for each in position.top}
        top.setdefault(token, position.chosen.logprob)
        _append(result, token, position.chosen.logprob, top, offset)
        offset += len(token)
    return result


def _append(
    to: TextLogprobs, token: str, logprob: float | None, top: dict[str, float] | None, offset: int
) -> None:
    to.tokens.append(token)
    to.token_logprobs.append(logprob)
    to.top_logprobs.append(top)
    to.text_offset.append(offset)


def _entry(position: PositionLogprobs, texts: TokenTexts) -> TokenLogprobEntry:
    token, logprob, raw = _parts(position.chosen, texts)
    return TokenLogprobEntry(token, logprob, raw, [TopLogprob(*_parts(each, texts)) for each in position.top])


def _parts(candidate: TokenLogprob, texts: TokenTexts) -> tuple[str, float, list[int]]:
    return (
        texts.text_of(candidate.token_id),
        max(candidate.logprob, _LEAST),
        list(texts.bytes_of(candidate.token_id)),
    )
