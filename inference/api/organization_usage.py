"""`GET /v1/organization/usage/{completions,embeddings}` and `/v1/organization/costs`, as OpenAI has them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from functools import partial
from typing import Final
from zoneinfo import ZoneInfo

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.api.report_parameters import read_ids
from inference.errors import InvalidRequest
from inference.replica import on_replica
from inference.reports import Dimension, Report, Width
from inference.schemas.organization_usage import GROUPS, UsageBucketPage, bucket_page_object
from inference.schemas.queries import CostBucketQuery, UsageBucketQuery
from inference.usage_buckets import Use, bucket_page, bucket_start
from tenants.principal import Principal, Scope

_LIMITS: Final = {Width.DAY: (7, 31), Width.HOUR: (24, 168)}
"""Buckets of a page by default, and at most."""
_COST_LIMITS: Final = (7, 180)
_PAGE: Final = re.compile(r"page_(\d{1,12})")


@endpoint("GET", scope=Scope.USAGE_READ, query=UsageBucketQuery, answer=UsageBucketPage)
async def completions(call: ApiCall) -> HttpResponse:
    """What the tenant's chats, completions, responses and messages used, by hour or day."""
    asked = call.query(UsageBucketQuery, refuses_others=True)
    return await _answer(call, asked, asked.models, Use.COMPLETIONS)


@endpoint("GET", scope=Scope.USAGE_READ, query=UsageBucketQuery, answer=UsageBucketPage)
async def embeddings(call: ApiCall) -> HttpResponse:
    """What its embeddings used."""
    asked = call.query(UsageBucketQuery, refuses_others=True)
    return await _answer(call, asked, asked.models, Use.EMBEDDINGS)


@endpoint("GET", scope=Scope.USAGE_READ, query=CostBucketQuery, answer=UsageBucketPage)
async def costs(call: ApiCall) -> HttpResponse:
    """What all of it cost, by day."""
    asked = call.query(CostBucketQuery, refuses_others=True)
    return await _answer(call, asked, asked.line_items, None)


async def _answer(
    call: ApiCall, asked: UsageBucketQuery | CostBucketQuery, models: list[str], use: Use | None
) -> HttpResponse:
    width = Width(asked.bucket_width)
    usual, most = _COST_LIMITS if use is None else _LIMITS[width]
    limit = usual if asked.limit is None else asked.limit
    if limit > most:
        raise InvalidRequest(
            f"'limit' must be from 1 to {most} with a 'bucket_width' of '{width}'.", param="limit"
        )
    report = _report(asked, models, width, call.principal)
    page = await sync_to_async(partial(on_replica, bucket_page, report, limit=limit, use=use))()
    return call.respond(bucket_page_object(page, use))


def _report(
    asked: UsageBucketQuery | CostBucketQuery, models: list[str], width: Width, principal: Principal
) -> Report:
    zone: tzinfo = UTC if width is Width.HOUR else ZoneInfo(principal.zone)
    since = bucket_start(datetime.fromtimestamp(asked.start_time, zone), width)
    until = datetime.now(zone) if asked.end_time is None else datetime.fromtimestamp(asked.end_time, zone)
    if asked.end_time is not None and asked.end_time <= asked.start_time:
        raise InvalidRequest("'end_time' comes after 'start_time'.", param="end_time")
    if asked.page is not None:
        since = _page_start(asked.page, since, until, width)
    filters = {
        Dimension.PROJECT: read_ids(asked.project_ids, "project_ids", are_uuids=True),
        Dimension.KEY: read_ids(asked.api_key_ids, "api_key_ids", are_uuids=True),
        Dimension.MODEL: models,
    }
    return Report(
        principal.tenant_id,
        since,
        until,
        width,
        tuple(dict.fromkeys(GROUPS[name] for name in asked.group_by)),
        {dimension: wanted for dimension, wanted in filters.items() if wanted},
    )


def _page_start(page: str, since: datetime, until: datetime, width: Width) -> datetime:
    found = _PAGE.fullmatch(page)
    if found is not None and since.timestamp() <= int(found[1]) < until.timestamp():
        start = datetime.fromtimestamp(int(found[1]), since.tzinfo)
        if bucket_start(start, width) == start:
            return start
    raise InvalidRequest("'page' will not do: give the 'next_page' of the page before.", param="page")
