"""What is submitted: one generation, checked as far as it can be without a quota; its id, and its salt."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import msgspec
import uuid_utils
from django.utils.crypto import salted_hmac

from engine_worker.protocol import Rung, SamplingParams
from inference.errors import InvalidRequest
from inference.models_served import ServedModel
from inference.schemas.sampling import SamplingFields
from tenants.counting import counted
from tenants.principal import Principal

_UUID7: Final = re.compile(r"-([0-9a-f]{12})7[0-9a-f]{19}")
_SHORT_ANSWER: Final = 256
"""Output tokens of who names no bound, while the engine asks for relief."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One generation, asked for and checked as far as it can be without a quota."""

    model: ServedModel
    prompt_token_ids: list[int]
    fields: SamplingFields
    requested_tokens: int | None
    """What the client gave as its bound; None leaves it to the context and the tier."""
    max_tokens_param: str
    endpoint: str
    request_id: str
    is_streamed: bool = True
    """False: the client waits for the whole answer."""
    grammar: str = ""
    """What the answer must follow."""
    continues_text: bool = False
    """Whether the answer's text goes on from the prompt's; a chat's begins anew."""
    text_lengths: list[int] = field(default_factory=list)
    """To be embedded, not gone on from: how many of the prompt's tokens are each text's."""
    may_exist: bool = False
    """The request has an idempotency key: another gateway may have begun it (idempotency.py)."""

    def max_tokens(self, principal: Principal) -> int:
        """Output tokens of one choice at most. Raises InvalidRequest."""
        context = self.model.card.context_length
        prompt = len(self.prompt_token_ids)
        requested = self.requested_tokens
        if prompt == 0:
            raise InvalidRequest("The prompt is empty: give at least one token.", param="prompt")
        if prompt >= context or (requested is not None and prompt + requested > context):
            wanted = f" and {requested} in the completion" if requested is not None else ""
            raise InvalidRequest(
                f"This model's maximum context length is {counted(context, 'token')}, but {prompt + (requested or 0)} "
                f"were requested ({prompt} in the prompt{wanted}). Shorten the prompt or the completion.",
                code="context_length_exceeded",
                param=self.max_tokens_param if prompt < context else None,
            )
        cap = principal.tier.max_output_tokens
        if requested is not None and requested > cap:
            raise InvalidRequest(
                f"'{self.max_tokens_param}' is {requested}, but your tier '{principal.tier.name}' allows at most "
                f"{counted(cap, 'output token')} per request.",
                param=self.max_tokens_param,
            )
        if requested is not None:
            return requested
        if principal.tier.rank > 0 and self.model.rung >= Rung.SHORTER_ANSWERS:
            cap = min(cap, _SHORT_ANSWER)
        if self.model.defaults.max_tokens is not None:
            cap = min(cap, self.model.defaults.max_tokens)
        return min(context - prompt, cap)

    def with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """What the operator or the model itself wants holds where the request names nothing."""
        defaults = self.model.sampling_defaults()
        unnamed = {name: value for name, value in defaults.items() if getattr(self.fields, name) is None}
        return msgspec.structs.replace(sampling, **unnamed) if unnamed else sampling


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid_utils.uuid7().hex}"


def made_at(request_id: str) -> int:
    """Unix time, seconds, of the moment that is in the id: the same for whoever tells of the request."""
    found = _UUID7.search(request_id)
    return int(found[1], 16) // 1000 if found else int(time.time())


@lru_cache(maxsize=4096)
def cache_salt(tenant_public_id: str, own: str) -> str:
    """Who may share cached prompts: one tenant, in it those who give the same salt of their own.

    With the server's secret in it, so that nobody can work out another's and time their prompts.
    """
    mac = salted_hmac("weir.prefix-cache", f"{tenant_public_id}\0{own}", algorithm="sha256")
    return mac.hexdigest()
