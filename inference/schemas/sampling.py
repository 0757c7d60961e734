"""The sampling fields that chat completions and completions share, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from engine_worker.protocol import LEAST_REPETITION_PENALTY, LOGPROBS_MAX, SamplingParams
from inference.errors import InvalidRequest
from inference.schemas.structured import StructuredFields
from tenants.counting import counted

Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"\S")]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=128)]
Priority: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ServiceTier: TypeAlias = Annotated[str, Meta(min_length=1, max_length=32)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""What clients note of a request for themselves: as in OpenAI's specification."""
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

STOPS_MAX = 4
_STOP_BYTES_MAX = 1000
_STOP_TOKEN_IDS_MAX = 64
_LOGIT_BIAS_MAX = 300


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted for clients that switch it off: Weir sends none."""


class SamplingFields(StructuredFields, kw_only=True):
    """None, here and below, means that the client left the field to the server."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    # What vLLM's users send.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10.0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """Parts a tenant's cached prompts; it never joins two tenants'."""

    def sampling_params(
        self, *, max_tokens: int, vocab_size: int, seed: int, grammar: str = ""
    ) -> SamplingParams:
        """For the engine. `max_tokens` is decided already; `seed` is used when the client gave none.

        Raises InvalidRequest with the field's name.
        """
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but at most {counted(max_tokens, 'token')} may be generated: lower it.",
                param="min_tokens",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=_logit_bias(self.logit_bias or {}, vocab_size),
            min_tokens=min_tokens,
            stop=_stop_strings(self.stop),
            stop_token_ids=_stop_token_ids(self.stop_token_ids or [], vocab_size),
            bad_words=tuple(self.bad_words or ()),
            ignore_eos=bool(self.ignore_eos),
            # The engine's seed has 64 bits; negative ones, which clients do send, are folded into them.
            seed=(seed if self.seed is None else self.seed) % 2**63,
            logprobs=self.logprobs_wanted(),
            prompt_logprobs=self.prompt_logprobs_wanted(),
            n=self.num_choices(),
            grammar=grammar,
        )

    def logprobs_wanted(self) -> int | None:
        """Alternatives per output token, where the route can report them."""
        return None

    def prompt_logprobs_wanted(self) -> int | None:
        return None

    def num_choices(self) -> int:
        return 1


class ScoringFields(SamplingFields, kw_only=True):
    """Of the routes whose answers can tell how likely the prompt was."""

    prompt_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    """Alternatives to each token of the prompt; not streamed."""
    stream: bool | None = None

    def refuse_streamed_scores(self) -> None:
        """As vLLM does: they come whole. Raises InvalidRequest."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "'prompt_logprobs' can't be streamed: leave 'stream' out.", param="prompt_logprobs"
            )

    def prompt_logprobs_wanted(self) -> int | None:
        return self.prompt_logprobs


def refuse_unsupported(fields: Any, neutral: dict[str, tuple[Any, ...]]) -> None:
    """A field that Weir can't honour is refused by name unless it says what happens anyway.

    `neutral` maps each such field to the values that change nothing.
    """
    for name, values in neutral.items():
        value = getattr(fields, name)
        if value is not None and value not in values:
            same = " or ".join(msgspec.json.encode(each).decode() for each in values)
            raise InvalidRequest(
                f"'{name}' is not supported yet: leave it out{same and f', or give {same}'}.",
                param=name,
                code="unsupported_parameter",
            )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > STOPS_MAX:
        raise InvalidRequest(f"'stop' takes at most {STOPS_MAX} strings, not {len(stops)}.", param="stop")
    if any(not text or len(text.encode(errors="replace")) > _STOP_BYTES_MAX for text in stops):
        raise InvalidRequest(
            f"Each string in 'stop' must have from 1 to {_STOP_BYTES_MAX} bytes.", param="stop"
        )
    return tuple(stops)


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > _STOP_TOKEN_IDS_MAX:
        raise InvalidRequest(
            f"'stop_token_ids' takes at most {_STOP_TOKEN_IDS_MAX} ids, not {len(ids)}.",
            param="stop_token_ids",
        )
    for token_id in ids:
        _check_in_vocabulary(token_id, vocab_size, "stop_token_ids")
    return tuple(ids)


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(bias) > _LOGIT_BIAS_MAX:
        raise InvalidRequest(
            f"'logit_bias' takes at most {_LOGIT_BIAS_MAX} tokens, not {len(bias)}.", param="logit_bias"
        )
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(
                f"'logit_bias' must map token ids to numbers; '{key[:40]}' is not a token id.",
                param="logit_bias",
            )
        token_id = int(key)
        _check_in_vocabulary(token_id, vocab_size, "logit_bias")
        result[token_id] = value
    return result


def _check_in_vocabulary(token_id: int, vocab_size: int, param: str) -> None:
    if token_id >= vocab_size:
        raise InvalidRequest(
            f"'{param}' names token {token_id}, but this model's ids must be from 0 to {vocab_size - 1}.",
            param=param,
        )
