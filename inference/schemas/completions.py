"""`POST /v1/completions`: what comes in."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from inference.errors import InvalidRequest
from inference.schemas.prompts import Prompts, prompts_of
from inference.schemas.sampling import (
    Choices,
    Priority,
    ScoringFields,
    StreamOptions,
    refuse_unsupported,
)

MAX_TOKENS_DEFAULT = 16
"""As in OpenAI's specification."""
PROMPTS_MAX = 64
_LOGPROBS_MAX = 5


class CompletionRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """0 scores the prompt, with `echo` and `logprobs`."""
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    """So many tiers after the key's own; 0 is that."""
    # Accepted; it changes nothing in the answer.
    user: str | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    """So many are made, and charged; the `n` with the highest log probability per token are told."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=_LOGPROBS_MAX)] | None = None
    # Known to clients, not honoured yet: see _NEUTRAL.
    suffix: str | None = None

    def check(self) -> None:
        """What the types can't say. Raises InvalidRequest."""
        refuse_unsupported(self, _NEUTRAL)
        self.refuse_streamed_scores()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' needs 'stream': true.", param="stream_options")
        if self.best_of is not None and self.best_of < self.num_told():
            raise InvalidRequest(f"'best_of' must be at least 'n', {self.num_told()}.", param="best_of")
        if self.is_ranked and self.stream:
            raise InvalidRequest(
                "'best_of' above 'n' can't be streamed, as which is best is known at the end: leave one out.",
                param="best_of",
            )
        self.prompts()

    def logprobs_wanted(self) -> int | None:
        return 0 if self.logprobs is None and self.is_ranked else self.logprobs

    def prompt_logprobs_wanted(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)

    def num_choices(self) -> int:
        """Those that are made, and charged."""
        return self.best_of or self.num_told()

    def num_told(self) -> int:
        return self.n or 1

    @property
    def is_ranked(self) -> bool:
        return self.num_choices() > self.num_told()

    @property
    def requested_tokens(self) -> int:
        return MAX_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """One entry per choice, in order: text, or token ids."""
        return prompts_of(self.prompt, param="prompt", at_most=PROMPTS_MAX)

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}
