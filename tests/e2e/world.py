"""Tenants with something to see."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import msgspec
from asgiref.sync import async_to_sync
from django.conf import settings
from django.utils import timezone

from inference.models import Announcement, Batch, ModelSetting, StoredFile, UsageRecord
from inference.services.decision import LimitTold, Told, as_text
from inference.services.partitions import ensure_partitions
from inference.services.submission import new_request_id
from inference.services.webhooks import create_webhook
from tenants.models import ApiKey, ApiKeyUse, Membership, ModelPrice, Role, Tenant
from tenants.principal import Calendar, LimitMetric, LimitScope
from tenants.quotas.store import QuotaStore
from tenants.services import Actor, create_project
from tenants.services.data_copies import ask_for_copy
from tenants.services.invitations import invitation_link, invite_member
from tenants.services.key_limits import KeyLimit, set_key_limits
from tenants.services.service_accounts import create_service_account, issue_service_key
from tests.e2e.site import MODEL
from tests.factories import Cast, make_key, make_tenant, set_limit

_PRICE = {
    "input_microusd_per_mtok": 150_000,
    "cached_input_microusd_per_mtok": 75_000,
    "output_microusd_per_mtok": 600_000,
}


def a_decision(at: datetime, *, prompt_tokens: int, output_tokens: int) -> Told:
    """About a request that five limits were asked for."""
    limits = [
        (LimitScope.TENANT, LimitMetric.REQUESTS, 600, 60, "", 1, 594),
        (LimitScope.TENANT, LimitMetric.TOKENS, 400_000, 60, "", prompt_tokens + output_tokens, 391_207),
        (LimitScope.TENANT, LimitMetric.CONCURRENCY, 64, 0, "", 1, 61),
        (LimitScope.KEY, LimitMetric.REQUESTS, 60, 60, "", 1, 0),
        (LimitScope.TIER, LimitMetric.COST, 250_000_000, 0, Calendar.MONTH, 3_072, 183_412_806),
    ]
    return Told(
        at_ms=int(1000 * at.timestamp()), prompt_tokens=prompt_tokens, max_output_tokens=4096,
        granted_output_tokens=output_tokens, seed=7_235_498_120_417, waited_ms=1250,
        limits=[
            LimitTold(
                scope=scope, owner="", metric=metric, amount=amount, period_s=period_s, burst=amount, calendar=calendar,
                is_hard=True, asked=asked, remaining=remaining, reset_after_ms=41_000,
            )
            for scope, metric, amount, period_s, calendar, asked, remaining in limits
        ],
    )  # fmt: skip


def refuse_a_request(tenant: Tenant, key: ApiKey | None) -> str:
    """As a limit of its key would, or, of the chat's, one of the tenant. The request's id."""
    decision = a_decision(timezone.now(), prompt_tokens=1_207, output_tokens=512)
    refusal = msgspec.structs.replace(
        decision, binding=3 if key else 0, retry_after_ms=17_300, requested=1, request_id=new_request_id("chatcmpl"),
        model=MODEL, key_id=str(key.public_id) if key else "",
    )  # fmt: skip
    async_to_sync(_note)(str(tenant.public_id), as_text(refusal))
    return refusal.request_id


async def _note(tenant_public_id: str, text: str) -> None:
    store = QuotaStore(settings.REDIS_URL, timeout_s=10, max_connections=1)
    try:
        await store.note_refusal(tenant_public_id, text)
    finally:
        await store.aclose()


def busy_tenant(cast: Cast) -> str:
    """A tenant with keys, limits and a week of requests."""
    make_tenant(f"Ministry of Long Names and Procurement, {cast.tenant.name}", owner=cast.owner)
    names = ("support bot, production", "nightly-evaluation-of-the-research-group")
    keys = [make_key(cast.tenant, name=name).api_key for name in names]
    for key in keys:
        ApiKeyUse.objects.create(api_key=key, last_used_at=timezone.now())
    for metric, amount in (
        (LimitMetric.REQUESTS, 600),
        (LimitMetric.TOKENS, 400_000),
        (LimitMetric.CONCURRENCY, 64),
    ):
        set_limit(cast.tenant, metric, amount)
    now = timezone.now()
    price, _ = ModelPrice.objects.get_or_create(
        model="of-the-records", defaults={"valid_from": now - timedelta(days=30), **_PRICE}
    )
    for number in range(40):
        prompt_tokens, completion_tokens = 37 * number + 12, 101 * number % 512
        finished = now - timedelta(hours=4 * number)
        created = finished - timedelta(milliseconds=900 + 211 * number)
        ensure_partitions([created.date()])
        decision = a_decision(created, prompt_tokens=prompt_tokens, output_tokens=512)
        UsageRecord.objects.create(
            tenant=cast.tenant,
            request_id=new_request_id("chatcmpl"),
            key_public_id=None if number % 3 == 0 else keys[number % 2].public_id,
            model=MODEL,
            tier="standard",
            endpoint="/v1/chat/completions",
            finish_reason=("stop", "stop", "length", "stop", "cancelled", "deadline", "error")[number % 7],
            error_code="engine_error" if number % 7 == 6 else "",
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost_microusd=(15 * prompt_tokens + 60 * completion_tokens) // 100,
            price_public_id=price.public_id,
            worker_id="engine-7c9d8bfb6-x2x4q-1b0f9c3e",
            attempts=1,
            decision=as_text(decision),
            created_at=created,
            day=created.date(),
            claimed_at=finished - timedelta(milliseconds=800 + 205 * number),
            first_token_at=finished - timedelta(milliseconds=700 + 200 * number),
            finished_at=finished,
        )
    return f"/t/{cast.tenant.public_id}/"


def make_batches(cast: Cast, key: ApiKey) -> None:
    """One that has ended, one that could not begin, one that runs."""
    now, tenant = timezone.now(), cast.tenant
    answers = StoredFile.objects.create(
        tenant=tenant, file_id=f"file-{tenant.public_id.hex}", filename="answers.jsonl", purpose="batch_output",
        num_bytes=3, content=b"{}\n",
    )  # fmt: skip
    told = [{"line": 17, "message": "Invalid JSON", "code": "invalid_json_line", "param": None}]
    states: list[dict[str, Any]] = [
        {"status": "completed", "total": 1200, "completed": 1188, "failed": 12, "ended_at": now - timedelta(hours=3),
         "output_file_id": answers.file_id},
        {"status": "failed", "errors": json.dumps(told).encode(), "ended_at": now - timedelta(hours=2)},
        {"status": "in_progress", "total": 400, "completed": 231, "failed": 3},
    ]  # fmt: skip
    for number, state in enumerate(states):
        Batch.objects.create(
            tenant=tenant, batch_id=f"batch_{number}{tenant.public_id.hex[1:]}", key_public_id=key.public_id,
            input_file_id="file-in", endpoint="/v1/chat/completions", expires_at=now + timedelta(hours=20), **state,
        )  # fmt: skip


def a_world(cast: Cast) -> dict[str, Any]:
    """A tenant with one of everything that a page shows, and the ids by which routes name them."""
    base = busy_tenant(cast)
    tenant, actor = cast.tenant, Actor.person(cast.owner)
    project = create_project(actor=actor, tenant=tenant, name="Search, the new one")
    create_project(actor=actor, tenant=tenant, name="An empty one")
    key = make_key(tenant, name="ci runner", project=project, allowed_models=[MODEL]).api_key
    set_key_limits(actor=actor, api_key=key, wanted={KeyLimit.REQUESTS_PER_MINUTE: 60})
    account = create_service_account(actor=actor, tenant=tenant, name="nightly evaluation")
    issue_service_key(actor=actor, account=account, name="its key")
    hook = create_webhook(
        actor=actor, tenant=tenant, url="https://hooks.example.org/weir?a=long-address-to-wrap"
    )
    ask_for_copy(actor=actor, tenant=tenant)
    email = f"guest-of-{tenant.slug}@example.org"
    invitation = invite_member(actor=actor, by=Role.OWNER, tenant=tenant, email=email, role=Role.VIEWER)
    ModelSetting.objects.get_or_create(name="fast", defaults={"target": MODEL, "temperature": 0.2})
    Announcement.objects.get_or_create(text="Tonight from 22:00 to 22:15 UTC the second machine is updated.")
    make_batches(cast, key)
    member = Membership.objects.for_tenant(tenant).get(user=cast.member)
    records = UsageRecord.objects.filter(tenant=tenant).order_by("-created_at")
    return {
        "base": base,
        "tenant_id": tenant.public_id,
        "key_id": key.public_id,
        "project_id": project.public_id,
        "webhook_id": hook.public_id,
        "member_id": member.public_id,
        "account_id": account.public_id,
        "invitation_id": invitation.public_id,
        "request_id": records[7].request_id,
        "refused_id": refuse_a_request(tenant, key),
        "invitation": "/" + invitation_link(invitation).split("/", 3)[3],  # this process knows no port
    }
