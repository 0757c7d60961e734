"""What may enter the engine: every limit is checked here, so that no step has to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from engine_worker.engine.detokenizer import Detokenizer
from engine_worker.engine.errors import InvalidRequest
from engine_worker.engine.grammar import GrammarError, Grammars, GrammarTooComplexError, Matcher
from engine_worker.engine.output_text import OutputText
from engine_worker.engine.prefix import PrefixKeys, root_key
from engine_worker.engine.sequence import Sequence
from engine_worker.engine.types import EngineRequest
from engine_worker.protocol import LEAST_REPETITION_PENALTY, LOGPROBS_MAX, SamplingParams

_LARGEST: Final = 1e30
"""Of a number that logits are changed by: beyond it they are no numbers of float32."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of one loaded model."""

    tokenizer: Tokenizer
    special_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    vocab_size: int
    grammars: Grammars
    max_model_len: int
    """Prompt plus output."""
    model_revision: str
    cached_block_size: int | None
    """Tokens per block of the prefix cache; None: there is none."""
    adapters: frozenset[str] = frozenset()

    def admit(self, request: EngineRequest, uid: int) -> Sequence:
        """The request as a sequence, with the tokens of an earlier attempt replayed. Raises InvalidRequest."""
        prompt = list(request.prompt_token_ids)
        sampling = request.sampling
        self._check_prompt(prompt)
        if request.adapter and request.adapter not in self.adapters:
            raise InvalidRequest(f"this model has no adapter {request.adapter!r}")
        self._check_sampling(sampling)
        if request.cancel_after is not None and request.cancel_after < 1:
            raise InvalidRequest(f"cancel_after must be 1 or more, it is {request.cancel_after}")
        self._check_ids("resumed_token_ids", request.resumed_token_ids)
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        sequence = Sequence(
            uid=uid,
            request=request,
            token_ids=prompt,
            num_prompt=len(prompt),
            max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt)),
            stop_ids=eos | frozenset(sampling.stop_token_ids),
            text=OutputText(
                Detokenizer(self.tokenizer, self.special_token_ids, prompt if request.continues_text else ()),
                sampling.stop,
            ),
            bad_words=self._bad_words(sampling),
            matcher=self._matcher(sampling),
            prefix=self._prefix(request),
        )
        # Replayed one by one, as they were made: the text that the earlier attempt let out, and what
        # it held back, follow from the tokens.
        for token_id in request.resumed_token_ids:
            if sequence.finish is None:
                sequence.append(token_id)
        sequence.take_output()
        # An earlier attempt that delivered a token has delivered the prompt's scores with it.
        if sampling.prompt_logprobs is not None and not request.resumed_token_ids:
            sequence.scored = []
        return sequence

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the beginning of a text and after a space."""
        written = {
            tuple(self.tokenizer.encode(before + word.lstrip(), add_special_tokens=False).ids): None
            for word in sampling.bad_words
            for before in ("", " ")
        }
        return tuple(ids for ids in written if ids)

    def _matcher(self, sampling: SamplingParams) -> Matcher | None:
        if not sampling.grammar:
            return None
        try:
            return self.grammars.matcher(sampling.grammar)
        except GrammarTooComplexError as error:
            raise InvalidRequest(f"the grammar is too complex: {error}") from error
        except GrammarError as error:
            raise InvalidRequest(f"the grammar is not valid: {error}") from error

    def _prefix(self, request: EngineRequest) -> PrefixKeys | None:
        if self.cached_block_size is None:
            return None
        root = root_key(model_revision=self.model_revision, adapter=request.adapter, salt=request.cache_salt)
        return PrefixKeys(root, self.cached_block_size)

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, which leaves no room for output in the context of "
                f"{self.max_model_len} tokens"
            )
        self._check_ids("the prompt", prompt)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for name, good, rule in (
            ("max_tokens", sampling.max_tokens >= 0, "0 or more"),
            ("n", sampling.n == 1, "1 here: each choice is a request"),
            ("temperature", 0 <= sampling.temperature <= _LARGEST, "0 or more"),
            ("top_k", sampling.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
            (
                "repetition_penalty",
                LEAST_REPETITION_PENALTY <= sampling.repetition_penalty <= _LARGEST,
                f"at least {LEAST_REPETITION_PENALTY}",
            ),
            ("frequency_penalty", _is_number(sampling.frequency_penalty), "a finite number"),
            ("presence_penalty", _is_number(sampling.presence_penalty), "a finite number"),
            ("logit_bias", all(map(_is_number, sampling.logit_bias.values())), "finite numbers"),
            ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "from 0 to max_tokens"),
            ("stop", all(sampling.stop), "without empty strings"),
            ("bad_words", all(map(str.strip, sampling.bad_words)), "without empty strings"),
            ("logprobs", _reportable(sampling.logprobs), f"from 0 to {LOGPROBS_MAX}"),
            ("prompt_logprobs", _reportable(sampling.prompt_logprobs), f"from 0 to {LOGPROBS_MAX}"),
        ):
            if not good:
                raise InvalidRequest(f"{name} must be {rule}, it is {getattr(sampling, name)!r}")
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", sampling.logit_bias)

    def _check_ids(self, where: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"{where} has token id {token_id}; this model's ids go from 0 to {self.vocab_size - 1}"
                )


def _is_number(value: float) -> bool:
    return abs(value) <= _LARGEST


def _reportable(count: int | None) -> bool:
    return count is None or 0 <= count <= LOGPROBS_MAX
