"""Conversations: kept for the person who had them, at the tenant where they were had, and for nobody else."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.test import Client
from django.urls import reverse

from inference.models import Conversation, Exchange
from inference.services import conversations as service
from tenants.models import Role
from tenants.services import add_member
from tests.factories import TEST, Cast
from tests.inference.test_console import signed_in


def url(name: str, cast: Cast, *ids: UUID) -> str:
    return reverse(name, args=[cast.tenant.public_id, *ids])


def an_exchange(
    exchange_id: UUID, question: str = "Why?", text: str = "Because.", **fields: Any
) -> dict[str, Any]:
    answer = {"id": exchange_id.hex, "model": "m", "text": text, "phase": "finished", "requestId": "r1"}
    return {"question": question, "answer": answer, "title": question, **fields}


def save(
    client: Client, cast: Cast, conversation: UUID, exchange: UUID | None = None, **fields: Any
) -> tuple[int, UUID]:
    exchange = exchange or uuid4()
    answer = client.put(
        url("exchange", cast, conversation, exchange),
        json.dumps(an_exchange(exchange, **fields)),
        content_type="application/json",
    )
    return answer.status_code, exchange


def titles(client: Client, cast: Cast, **query: Any) -> list[str]:
    answer = client.get(url("conversations", cast), query).json()
    return [row["title"] for row in answer["conversations"]]


def test_saved_listed_read_renamed_deleted(cast: Cast):
    client, conversation = signed_in(cast.owner), uuid4()
    status, first = save(client, cast, conversation, question="Why is the sky blue?")
    assert status == 204
    _, second = save(client, cast, conversation, question="And red?", parent=str(first))
    assert titles(client, cast) == ["Why is the sky blue?"]
    read = client.get(url("conversation", cast, conversation)).json()
    assert [(one["id"], one["parent"], one["question"]) for one in read["exchanges"]] == [
        (first.hex, None, "Why is the sky blue?"),
        (second.hex, first.hex, "And red?"),
    ]
    assert read["leaf"] == second.hex
    save(
        client, cast, conversation, first, question="Why is the sky blue?", text="Rayleigh.", leaf=str(second)
    )
    read = client.get(url("conversation", cast, conversation)).json()
    assert [one["answer"]["text"] for one in read["exchanges"]] == ["Rayleigh.", "Because."]
    assert read["leaf"] == second.hex
    change = {"title": "  Colours \n of the sky ", "leaf": str(first)}
    answer = client.patch(
        url("conversation", cast, conversation), json.dumps(change), content_type="application/json"
    )
    assert answer.status_code == 204
    assert titles(client, cast) == ["Colours of the sky"]
    assert client.delete(url("conversation", cast, conversation)).status_code == 204
    assert titles(client, cast) == []
    assert not Exchange.objects.filter(tenant=cast.tenant).exists()
    assert client.get(url("conversation", cast, conversation)).status_code == 404


SET = {
    "model": "m",
    "tier": "batch",
    "other": "",
    "system": "Be \0brief.",
    "params": {"temperature": 0.5, "seed": 7},
}


def test_what_is_set_is_kept_with_it(cast: Cast):
    client, conversation = signed_in(cast.owner), uuid4()
    page = url("conversation", cast, conversation)
    _, first = save(client, cast, conversation)
    assert client.get(page).json()["settings"] is None
    save(client, cast, conversation, first, settings=SET)
    kept = {**SET, "system": "Be \ufffdbrief."}
    assert client.get(page).json()["settings"] == kept
    save(client, cast, conversation, settings=None)
    assert client.get(page).json()["settings"] == kept, "an older page tells none, and takes none away"
    change = {"settings": {**SET, "system": "# Now\n<b>long</b>", "params": {}}}
    assert client.patch(page, json.dumps(change), content_type="application/json").status_code == 204
    assert client.get(page).json()["settings"] == change["settings"]
    exported = client.get(url("export_markdown", cast, conversation)).content.decode()
    assert "## System prompt\n\n# Now\n<b>long</b>\n\n## You" in exported
    for bad in (
        {**SET, "params": {"top_p": "x"}},
        {**SET, "model": "m" * 257},
        {**SET, "params": {f"p{n}": n for n in range(17)}},
        "none",
    ):
        answer = client.patch(page, json.dumps({"settings": bad}), content_type="application/json")
        assert answer.status_code == 400, bad
    assert client.get(page).json()["settings"] == change["settings"]
    elsewhere = signed_in(cast.member).patch(page, json.dumps(change), content_type="application/json")
    assert elsewhere.status_code == 404


def test_nobody_else_reads_or_changes_it(cast: Cast):
    conversation = uuid4()
    _, exchange = save(signed_in(cast.owner), cast, conversation, question="A secret")
    add_member(actor=TEST, tenant=cast.other_tenant, user=cast.owner, role=Role.DEVELOPER)
    elsewhere = reverse("conversation", args=[cast.other_tenant.public_id, conversation])
    assert signed_in(cast.owner).get(elsewhere).status_code == 404, "it belongs to the tenant it was had at"
    for user in (cast.member, cast.outsider, cast.operator):
        client = signed_in(user)
        page = url("conversation", cast, conversation)
        assert client.get(page).status_code == 404
        assert client.delete(page).status_code == 404
        assert client.patch(page, '{"title": "x"}', content_type="application/json").status_code == 404
        assert client.get(url("export_json", cast, conversation)).status_code == 404
        assert client.get(url("export_markdown", cast, conversation)).status_code == 404
        assert save(client, cast, conversation, exchange, question="Mine now")[0] == 404
        listed = client.get(url("conversations", cast))
        assert b"A secret" not in listed.content
    assert Exchange.objects.get(tenant=cast.tenant).question == "A secret"
    assert Client().get(url("conversation", cast, conversation)).status_code == 302


def test_search_finds_titles_questions_and_answers(cast: Cast):
    client = signed_in(cast.owner)
    save(client, cast, uuid4(), question="Tea", text="Steep it for 3 minutes, 100% hot.")
    save(client, cast, uuid4(), question="Coffee", text="Grind it.")
    assert titles(client, cast, q="tea") == ["Tea"]
    assert titles(client, cast, q="grind") == ["Coffee"]
    assert titles(client, cast, q="100%") == ["Tea"]
    assert titles(client, cast, q="' OR 1=1 --") == []
    assert titles(client, cast, q="") == ["Coffee", "Tea"]


def test_long_lists_are_paged_in_a_bounded_number_of_queries(cast: Cast, django_assert_max_num_queries: Any):
    Conversation.objects.bulk_create(
        [
            Conversation(tenant=cast.tenant, user=cast.owner, public_id=uuid4(), title=f"t{number}")
            for number in range(60)
        ]
    )
    client = signed_in(cast.owner)
    with django_assert_max_num_queries(8):
        first = client.get(url("conversations", cast)).json()
    rest = client.get(url("conversations", cast), {"offset": 50}).json()
    assert (len(first["conversations"]), first["has_more"]) == (50, True)
    assert (len(rest["conversations"]), rest["has_more"]) == (10, False)


def test_exports_are_files_of_what_was_said(cast: Cast):
    client, conversation = signed_in(cast.owner), uuid4()
    hostile = '<script>alert(1)</script>"\r\nX-Evil: 1'
    _, first = save(client, cast, conversation, question=hostile)
    save(client, cast, conversation, question="An old branch", parent=str(first))
    save(client, cast, conversation, question="The branch", text="# Yes\n\n`x`", parent=str(first))
    as_json = client.get(url("export_json", cast, conversation))
    assert as_json.headers["Content-Disposition"].startswith('attachment; filename="chat-')
    assert "X-Evil" not in as_json.headers
    assert len(as_json.json()["exchanges"]) == 3
    as_markdown = client.get(url("export_markdown", cast, conversation))
    assert as_markdown.headers["Content-Type"] == "text/markdown; charset=utf-8"
    assert as_markdown.headers["X-Content-Type-Options"] == "nosniff"
    text = as_markdown.content.decode()
    assert "The branch" in text
    assert "# Yes\n\n`x`" in text
    assert "An old branch" not in text


def test_what_a_page_can_not_have_made_is_refused(cast: Cast):
    client, conversation, exchange = signed_in(cast.owner), uuid4(), uuid4()
    target = url("exchange", cast, conversation, exchange)
    good = an_exchange(exchange)
    for bad in (
        {**good, "question": ""},
        {**good, "answer": {**good["answer"], "phase": "<b>"}},
        {**good, "answer": {**good["answer"], "id": "../../x"}},
        {**good, "parent": "none"},
        {**good, "title": "x" * 121},
        [],
    ):
        answer = client.put(target, json.dumps(bad), content_type="application/json")
        assert answer.status_code == 400, bad
    assert client.put(target, b"\xff", content_type="application/json").status_code == 400
    assert not Conversation.objects.filter(tenant=cast.tenant).exists()
    assert save(client, cast, conversation, exchange, text="a\0b\ud83d\ude00")[0] == 204
    assert Exchange.objects.get(tenant=cast.tenant).answer["text"] == "a\ufffdb\U0001f600"


def test_forged_requests_are_refused(cast: Cast):
    client = Client(enforce_csrf_checks=True)
    client.force_login(cast.owner)
    assert save(client, cast, uuid4())[0] == 403


def test_bounds_on_what_one_person_stores(cast: Cast, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "EXCHANGES_MAX", 2)
    monkeypatch.setattr(service, "CONVERSATIONS_MAX", 1)
    client, conversation = signed_in(cast.owner), uuid4()
    assert save(client, cast, conversation)[0] == 204
    _, last = save(client, cast, conversation)
    assert save(client, cast, conversation)[0] == 400
    assert save(client, cast, conversation, last)[0] == 204, "the end of one that is kept is still kept"
    assert save(client, cast, uuid4())[0] == 400
    assert save(signed_in(cast.member), cast, uuid4())[0] == 204
