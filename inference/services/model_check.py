"""A test prompt of the operator's: through the queue to a worker and back, for no tenant and no charge."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Final

from django.conf import settings

from engine_worker.broker import BrokerUnavailable, GatewayBroker, QueueFull
from engine_worker.protocol import FinishReason, GenerateRequest, SamplingParams
from inference.errors import ApiError
from inference.models_served import ModelCatalogue
from inference.schemas.chat import ChatMessage
from inference.services.ledger import NOBODY
from inference.services.prepare import tokenise_chat
from inference.services.submission import cache_salt, new_request_id
from inference.site_policy import SitePolicy
from inference.streams import LiveStreams, StreamLost
from tenants.principal import TierSpec

PROMPT_MAX: Final = 500
_TOKENS: Final = 48
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Checked:
    text: str = ""
    tokens: int = 0
    first_token_ms: int = 0
    tokens_per_s: float = 0.0
    trouble: str = ""
    """Why there is no answer, or not all of it, in words for the operator."""


async def check_model(name: str, prompt: str, tier: TierSpec) -> Checked:
    """Asks as a request of that tier would. Never raises: what went wrong is the answer."""
    # Of its own: a page runs on whatever event loop its thread was given.
    broker = GatewayBroker(settings.REDIS_URL)
    policy = SitePolicy()
    models = ModelCatalogue(broker, policy)
    streams = LiveStreams(broker, uuid.uuid4().hex)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await _ask(broker, models, streams, name, prompt, tier)
    except TimeoutError:
        return Checked(trouble=f"No answer within {_PATIENCE_S:.0f} s. Is its worker still loading, or busy?")
    except QueueFull:
        return Checked(trouble="The queue is full.")
    except BrokerUnavailable:
        return Checked(trouble="The queue can\u2019t be reached: is Redis running?")
    except (ApiError, StreamLost) as error:
        return Checked(trouble=str(error))
    finally:
        await streams.aclose()
        await models.aclose()
        await policy.aclose()
        await broker.aclose()


async def _ask(
    broker: GatewayBroker,
    models: ModelCatalogue,
    streams: LiveStreams,
    name: str,
    prompt: str,
    tier: TierSpec,
) -> Checked:
    model = await models.get(name, tenant_public_id=NOBODY, kind="generate")
    prompt_ids = await tokenise_chat(models, model, [ChatMessage(role="user", content=prompt)], None)
    asked_at = time.monotonic()
    created_at_ms = int(time.time() * 1000)
    request = GenerateRequest(
        request_id=new_request_id("check"),
        model=model.card.model,
        tenant_id=NOBODY,
        tier=tier.name,
        tier_rank=tier.rank,
        prompt_token_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=_TOKENS, temperature=0.0),
        created_at_ms=created_at_ms,
        deadline_ms=created_at_ms + int(_PATIENCE_S * 1000),
        reply_channel=streams.channel,
        endpoint="setup",
        adapter=model.adapter,
        cache_salt=cache_salt(NOBODY, ""),
    )
    async with await streams.open(request.model, request.request_id, is_new=True) as stream:
        await broker.enqueue(
            request, max_queued=tier.max_queued, max_queued_per_tenant=tier.max_queued_per_tenant
        )
        text, tokens, first_at = "", 0, 0.0
        while (chunk := await stream.next(_PATIENCE_S)) is not None:
            text += chunk.text
            tokens += len(chunk.token_ids)
            if tokens and not first_at:
                first_at = time.monotonic()
            if chunk.finish is not None:
                break
    ended_at = time.monotonic()
    finish = chunk.finish if chunk else None
    trouble = ""
    if finish is None or finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        trouble = finish.error.message if finish and finish.error else "The answer broke off."
    return Checked(
        text=text,
        tokens=tokens,
        first_token_ms=round(1000 * (first_at - asked_at)) if first_at else 0,
        tokens_per_s=round((tokens - 1) / (ended_at - first_at), 1)
        if tokens > 1 and ended_at > first_at
        else 0.0,
        trouble=trouble,
    )
