"""Tenants with something to see."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.utils import timezone

from inference.models import Announcement, Batch, ModelSetting, StoredFile, UsageRecord
from inference.services.partitions import ensure_partitions
from inference.services.webhooks import create_webhook
from tenants.models import ApiKey, ApiKeyUse, Membership, Role
from tenants.principal import LimitMetric
from tenants.services import Actor, create_project
from tenants.services.data_copies import ask_for_copy
from tenants.services.invitations import invitation_link, invite_member
from tenants.services.key_limits import KeyLimit, set_key_limits
from tenants.services.service_accounts import create_service_account, issue_service_key
from tests.e2e.site import MODEL
from tests.factories import Cast, make_key, make_tenant, set_limit


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
    for number in range(40):
        finished = now - timedelta(hours=4 * number)
        created = finished - timedelta(milliseconds=900 + 211 * number)
        ensure_partitions([created.date()])
        UsageRecord.objects.create(
            tenant=cast.tenant,
            request_id=f"{cast.tenant.public_id}-{number}",
            key_public_id=None if number % 3 == 0 else keys[number % 2].public_id,
            model=MODEL,
            tier="standard",
            finish_reason=("stop", "stop", "length", "stop", "cancelled", "deadline", "error")[number % 7],
            error_code="engine_error" if number % 7 == 6 else "",
            prompt_tokens=37 * number + 12,
            completion_tokens=101 * number % 512,
            created_at=created,
            day=created.date(),
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
    return {
        "base": base,
        "tenant_id": tenant.public_id,
        "key_id": key.public_id,
        "project_id": project.public_id,
        "webhook_id": hook.public_id,
        "member_id": member.public_id,
        "account_id": account.public_id,
        "invitation_id": invitation.public_id,
        "request_id": f"{tenant.public_id}-7",
        "invitation": "/" + invitation_link(invitation).split("/", 3)[3],  # this process knows no port
    }
