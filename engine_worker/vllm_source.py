"""Token ids from vLLM's AsyncLLM: all that is asked of vLLM, in vLLM's own words."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from engine_worker.config import EngineConfig
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.engine.sequence import Sequence


class TokenSource(Protocol):
    """What the engine needs of vLLM."""

    @property
    def is_dead(self) -> bool: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def generate(self, sequence: Sequence) -> AsyncGenerator[Any, None]:
        """vLLM's `RequestOutput`s with what is new in each. Closing the iterator aborts the request."""

    def shutdown(self) -> None: ...


class AsyncLLMSource:
    """vLLM's AsyncLLM (https://docs.vllm.ai, `vllm.v1.engine.async_llm`)."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import vllm
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise UnsupportedModel(f"backend vllm needs vLLM, which can't be imported: {error}") from error
        self._vllm, self._delta = vllm, RequestOutputKind.DELTA
        self._uses_cache = config.prefix_cache
        fields = {
            "model": str(config.model_dir),
            "dtype": "float32" if config.precision == "fp32" else "auto",
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "enable_prefix_caching": config.prefix_cache,
            "scheduling_policy": "priority",
            "generation_config": "vllm",  # no defaults of the model's: the gateway has set every field
            "disable_log_stats": True,
            "enable_log_requests": False,
            **config.vllm_fields(),
        }
        if unknown := fields.keys() - {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}:
            raise UnsupportedModel(f"vllm_args: this vLLM has no {', '.join(sorted(unknown))}")
        self._llm = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**fields))

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    @property
    def max_model_len(self) -> int:
        return int(self._llm.vllm_config.model_config.max_model_len)

    @property
    def num_blocks(self) -> int:
        return int(self._llm.vllm_config.cache_config.num_gpu_blocks or 0)

    def generate(self, sequence: Sequence) -> AsyncGenerator[Any, None]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(sequence.token_ids)}
        if self._uses_cache and sequence.request.cache_salt:
            prompt["cache_salt"] = sequence.request.cache_salt
        stream: AsyncGenerator[Any, None] = self._llm.generate(
            prompt, self._params(sequence), str(sequence.uid), priority=sequence.rank
        )
        return stream

    def _params(self, sequence: Sequence) -> Any:
        given = sequence.sampling
        left = max(1, sequence.max_tokens - sequence.num_output)
        return self._vllm.SamplingParams(
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
            repetition_penalty=given.repetition_penalty,
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            logit_bias=dict(given.logit_bias) or None,
            bad_words=list(given.bad_words),
            seed=given.seed,
            max_tokens=left,
            min_tokens=min(left, max(0, given.min_tokens - sequence.num_output)),
            # All that may end it, so that vLLM keeps them out before min_tokens.
            stop_token_ids=sorted(sequence.stop_ids),
            ignore_eos=True,
            logprobs=given.logprobs,
            prompt_logprobs=given.prompt_logprobs if sequence.scored is not None else None,
            detokenize=False,
            output_kind=self._delta,
        )

    def shutdown(self) -> None:
        self._llm.shutdown()
