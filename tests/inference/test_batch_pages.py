"""The console's page of batch jobs: one is started, looked at, cancelled, and its files are fetched."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse
from django.utils import timezone

from inference.models import Batch, StoredFile
from tenants.models import Role
from tenants.services import add_member
from tests.factories import TEST, Cast, make_key, make_user, signed_in

pytestmark = pytest.mark.django_db

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'


def batch_of(cast: Cast, **values: Any) -> Batch:
    batch_id = f"batch_{cast.tenant.public_id.hex}"
    return Batch.objects.create(
        tenant=cast.tenant, batch_id=batch_id, input_file_id="file-in", endpoint="/v1/chat/completions",
        expires_at=timezone.now(), **values,
    )  # fmt: skip


def page_of(cast: Cast) -> str:
    return reverse("batches", args=[cast.tenant.public_id])


def test_one_is_started_under_a_keys_limits(cast: Cast):
    owner, key = signed_in(cast.owner), make_key(cast.tenant, name="nightly").api_key
    empty = owner.get(page_of(cast)).content.decode()
    assert "No batches yet" in empty
    file = SimpleUploadedFile("lines.jsonl", LINE)
    begun = owner.post(page_of(cast), {"file": file, "key": key.public_id}, follow=True).content.decode()
    assert "It is checked now" in begun
    assert "validating" in begun
    batch = Batch.objects.get(tenant=cast.tenant)
    assert batch.key_public_id == key.public_id
    assert bytes(StoredFile.objects.get(tenant=cast.tenant, file_id=batch.input_file_id).content) == LINE
    refused = owner.post(page_of(cast), {"key": key.public_id}, follow=True).content.decode()
    assert "Choose a file of lines" in refused


def test_how_far_it_is_and_why_it_could_not_begin(cast: Cast):
    told = b'[{"line": 17, "message": "<b>Invalid JSON</b>", "code": "invalid_json_line", "param": null}]'
    batch_of(cast, status="in_progress", total=1400, completed=1231, failed=3)
    page = signed_in(cast.owner).get(page_of(cast)).content.decode()
    assert '<progress max="1400" value="1234"' in page
    assert "1,234 of 1,400" in page
    assert "3 failed" in page
    Batch.objects.filter(tenant=cast.tenant).update(status="failed", errors=told, ended_at=timezone.now())
    page = signed_in(cast.owner).get(page_of(cast)).content.decode()
    assert "Line 17: &lt;b&gt;Invalid JSON" in page


def test_cancelling_asks_first(cast: Cast):
    batch = batch_of(cast, status="in_progress", total=4, completed=1)
    cancel = reverse("cancel_batch", args=[cast.tenant.public_id, batch.batch_id])
    owner = signed_in(cast.owner)
    assert "can be fetched" in owner.get(cancel).content.decode()
    batch.refresh_from_db()
    assert batch.status == "in_progress"
    viewer = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=viewer, role=Role.VIEWER)
    assert signed_in(viewer).get(cancel).status_code == 403
    elsewhere = reverse("cancel_batch", args=[cast.other_tenant.public_id, batch.batch_id])
    assert signed_in(cast.outsider).get(elsewhere).status_code == 404
    assert "is being cancelled" in owner.post(cancel, follow=True).content.decode()
    batch.refresh_from_db()
    assert batch.status == "cancelling"


def test_its_files_are_for_those_who_may_generate(cast: Cast):
    answers = StoredFile.objects.create(
        tenant=cast.tenant, file_id=f"file-{cast.tenant.public_id.hex}", filename="a.jsonl", purpose="batch_output",
        num_bytes=3, content=b"{}\n",
    )  # fmt: skip
    batch_of(
        cast,
        status="completed",
        total=1,
        completed=1,
        ended_at=timezone.now(),
        output_file_id=answers.file_id,
    )
    address = reverse("batch_file", args=[cast.tenant.public_id, answers.file_id])
    owner = signed_in(cast.owner)
    assert f'href="{address}"' in owner.get(page_of(cast)).content.decode()
    file = owner.get(address)
    assert file.content == b"{}\n"
    assert "attachment" in file.headers["Content-Disposition"]
    viewer = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=viewer, role=Role.VIEWER)
    assert address not in signed_in(viewer).get(page_of(cast)).content.decode()
    assert signed_in(viewer).get(address).status_code == 403
