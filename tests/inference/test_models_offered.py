"""Which models the pages offer: all that can be asked for, each where it can be used."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.test import override_settings
from django.urls import reverse

from engine_worker.broker import WorkerBroker
from engine_worker.protocol import WorkerStatus
from inference.fleet import chat_models, models_to_ask_for
from inference.models import ModelSetting
from tenants.models import ApiKey
from tests.engine_worker.models import a_card, byte_tokenizer
from tests.factories import Cast, signed_in

pytestmark = pytest.mark.django_db


async def _serve(name: str, *, kind: str, adapters: dict[str, str], is_alive: bool = True) -> None:
    card = msgspec.structs.replace(a_card(), model=name, kind=kind, adapters=adapters)
    broker = WorkerBroker(settings.REDIS_URL, model=name, worker_id=f"of-{name}", timeout_s=5)
    try:
        await broker.register(card, byte_tokenizer().to_str().encode())
        numbers = ("started_at_ms", "updated_at_ms", "steps", "running", "waiting", "kv_blocks_total")
        status = WorkerStatus(
            worker_id=f"of-{name}", model=name, device="cpu", max_num_seqs=1, step_ms=1.0, kv_blocks_used=0,
            draining=not is_alive, **dict.fromkeys(numbers, 1),
        )  # fmt: skip
        await broker.heartbeat(status, tokenizer_sha256="x")
    finally:
        await broker.aclose()


async def _leave(name: str) -> None:
    broker = WorkerBroker(settings.REDIS_URL, model=name, worker_id=f"of-{name}", timeout_s=5)
    try:
        await broker.farewell()
        await broker.withdraw()
    finally:
        await broker.aclose()


@pytest.fixture
def served(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """By what they are, the names of this test's models; the rest of the fleet is another test's."""
    monkeypatch.setattr("inference.fleet._TIMEOUT_S", 30.0)  # a busy machine is no queue that is away
    tag = uuid.uuid4().hex[:8]
    names = {each: f"{each}-{tag}" for each in ("chat", "vectors", "away", "best", "near", "theirs")}
    tenant, other = (str(each.public_id) for each in (cast.tenant, cast.other_tenant))
    serve = async_to_sync(_serve)
    serve(names["chat"], kind="generate", adapters={"polite": "", "ours": tenant, "secret": other})
    serve(names["vectors"], kind="embedding", adapters={})
    serve(names["away"], kind="generate", adapters={}, is_alive=False)
    ModelSetting.objects.create(name=names["best"], target=names["chat"])
    ModelSetting.objects.create(name=names["near"], target=names["vectors"])
    hidden = ModelSetting.objects.create(name=names["theirs"], target=names["chat"], is_public=False)
    hidden.tenants.add(cast.other_tenant)
    yield names
    for name in ("chat", "vectors", "away"):
        async_to_sync(_leave)(names[name])


def _of_this_test(found: list[str], names: dict[str, str]) -> set[str]:
    """As the names of `served`, with the adapter."""
    by_name = {name: each for each, name in names.items()}
    pairs = (name.partition(":") for name in found)
    return {f"{by_name[name]}{colon}{adapter}" for name, colon, adapter in pairs if name in by_name}


CHATS = {"chat", "chat:polite", "chat:ours", "best", "best:polite", "best:ours"}


def test_a_chat_is_offered_what_generates_and_is_there(cast: Cast, served: dict[str, str]):
    assert _of_this_test(chat_models(cast.tenant), served) == CHATS
    assert _of_this_test(chat_models(), served) == {"chat", "chat:polite", "best", "best:polite"}
    page = signed_in(cast.owner).get(reverse("chat", args=[cast.tenant.public_id])).content.decode()
    offered = re.findall(
        r'<option value="([^"]+)"', page.partition('id="model"')[2].partition("</select>")[0]
    )
    assert _of_this_test(offered, served) == CHATS


def test_a_key_can_be_bound_to_all_that_can_be_asked_for(cast: Cast, served: dict[str, str]):
    wanted = CHATS | {"vectors", "near", "away"}
    assert _of_this_test(models_to_ask_for(cast.tenant), served) == wanted
    client, keys = signed_in(cast.owner), reverse("keys", args=[cast.tenant.public_id])
    offered = re.findall(r'name="allowed_models" value="([^"]+)"', client.get(keys).content.decode())
    assert _of_this_test(offered, served) == wanted
    bound = sorted([served["vectors"], f"{served['chat']}:polite"])
    client.post(keys, {"name": "bot", "lifetime": "0", "allowed_models": bound})
    assert ApiKey.objects.get(tenant=cast.tenant).allowed_models == bound


@pytest.mark.parametrize(
    ("page", "fields"),
    [
        ("tenants_modelprice", ["model"]),
        ("tenants_quotalimit", ["model"]),
        ("inference_modelsetting", ["name", "target"]),
    ],
)
def test_the_operators_forms_offer_the_models_that_there_are(
    cast: Cast, served: dict[str, str], page: str, fields: list[str]
):
    """A price of a misspelt one would hold for none, and nobody would be told."""
    form = signed_in(cast.operator).get(reverse(f"admin:{page}_add")).content.decode()
    offered = re.findall(r'<option value="([^"]+)"', form.partition('<datalist id="model-names">')[2])
    assert _of_this_test(offered, served) == {"chat", "vectors", "away"}
    for field in fields:
        assert re.search(rf'<input[^>]* name="{field}"[^>]* list="model-names"', form)


def test_without_the_queue_a_key_can_still_be_bound_to_what_the_operator_names(
    cast: Cast, served: dict[str, str]
):
    with override_settings(REDIS_URL="redis://127.0.0.1:1/0", EXPECTED_MODELS=["to-come"]):
        names = models_to_ask_for(cast.tenant)
        assert "to-come" in names
        assert _of_this_test(names, served) == {"best", "near"}
        assert chat_models(cast.tenant) == []


def test_a_copied_command_names_a_model_that_its_tenant_may_use(
    cast: Cast, served: dict[str, str], monkeypatch
):
    """Also one that is for it alone."""
    for row in ModelSetting.objects.all():
        row.delete()
    alone = ModelSetting.objects.create(name=served["chat"], is_public=False)
    alone.tenants.add(cast.tenant)
    monkeypatch.setattr("inference.views.chat_models", partial(_those_of, served))
    page = signed_in(cast.owner).get(reverse("docs")).content.decode()
    assert f'model="{served["chat"]}"' in page


def _those_of(served: dict[str, str], tenant: object = None) -> list[str]:
    return [name for name in chat_models(tenant) if _of_this_test([name], served)]  # type: ignore[arg-type]
