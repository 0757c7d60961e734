"""`/v1/organization/usage` and `/v1/organization/costs`: OpenAI's shape of what `/v1/usage` tells."""

from __future__ import annotations

from typing import Literal

import msgspec

from inference.reports import Dimension, Line
from inference.usage_buckets import Bucket, BucketPage, Use

GROUPS = {
    "project_id": Dimension.PROJECT,
    "api_key_id": Dimension.KEY,
    "model": Dimension.MODEL,
    "line_item": Dimension.MODEL,
    "service_tier": Dimension.TIER,
}
"""What reports call OpenAI's names."""


class CompletionsResult(
    msgspec.Struct, tag_field="object", tag="organization.usage.completions.result", kw_only=True
):
    """Of chats, completions, responses and messages. Names are null that it is not grouped by."""

    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    num_model_requests: int
    project_id: str | None
    user_id: None = None
    api_key_id: str | None
    model: str | None
    batch: None = None
    service_tier: str | None


class EmbeddingsResult(
    msgspec.Struct, tag_field="object", tag="organization.usage.embeddings.result", kw_only=True
):
    input_tokens: int
    num_model_requests: int
    project_id: str | None
    user_id: None = None
    api_key_id: str | None
    model: str | None
    service_tier: str | None


class Amount(msgspec.Struct):
    value: float
    currency: Literal["usd"] = "usd"


class CostsResult(msgspec.Struct, tag_field="object", tag="organization.costs.result", kw_only=True):
    """Adjustments are in it. `/v1/usage/costs` has the same to the micro-USD, in whole numbers."""

    amount: Amount
    line_item: str | None
    """A model; null of what an adjustment is for none."""
    project_id: str | None
    api_key_id: str | None


class UsageBucket(msgspec.Struct, kw_only=True):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[CompletionsResult | EmbeddingsResult | CostsResult]


class UsageBucketPage(msgspec.Struct, kw_only=True):
    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


def bucket_page_object(page: BucketPage, use: Use | None) -> UsageBucketPage:
    """`use` None: costs."""
    next_page = None if page.next_at is None else f"page_{int(page.next_at.timestamp())}"
    return UsageBucketPage(
        data=[_bucket(bucket, use) for bucket in page.buckets],
        has_more=next_page is not None,
        next_page=next_page,
    )


def _bucket(bucket: Bucket, use: Use | None) -> UsageBucket:
    return UsageBucket(
        start_time=int(bucket.starts_at.timestamp()),
        end_time=int(bucket.ends_at.timestamp()),
        # An adjustment is no request.
        results=[_result(line, use) for line in bucket.lines if use is None or line.requests],
    )


def _result(line: Line, use: Use | None) -> CompletionsResult | EmbeddingsResult | CostsResult:
    def name(dimension: Dimension) -> str | None:
        return line.groups.get(dimension) or None

    project, key, model = name(Dimension.PROJECT), name(Dimension.KEY), name(Dimension.MODEL)
    if use is None:
        amount = Amount(line.total_microusd / 1_000_000)
        return CostsResult(amount=amount, line_item=model, project_id=project, api_key_id=key)
    if use is Use.EMBEDDINGS:
        return EmbeddingsResult(
            input_tokens=line.prompt_tokens,
            num_model_requests=line.requests,
            project_id=project,
            api_key_id=key,
            model=model,
            service_tier=name(Dimension.TIER),
        )
    return CompletionsResult(
        input_tokens=line.prompt_tokens,
        input_cached_tokens=line.cached_tokens,
        output_tokens=line.completion_tokens,
        num_model_requests=line.requests,
        project_id=project,
        api_key_id=key,
        model=model,
        service_tier=name(Dimension.TIER),
    )
