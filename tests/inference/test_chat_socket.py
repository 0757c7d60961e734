"""`/ws/chat` over a real socket: start, stop, several at once, resume, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.test import Client
from msgspec import structs
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import Role, User
from tenants.principal import LimitMetric
from tenants.services import add_member, set_model_price, suspend_tenant
from tests.e2e.site import MODEL, Site, wait_until
from tests.engine_worker.models import a_card
from tests.factories import TEST, Cast, make_cast, make_tier, make_user, set_limit
from tests.inference.api.test_life import HEARD_WITHIN_S, as_its_worker

pytestmark = pytest.mark.django_db(transaction=True)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def cast(transactional_db: None) -> Cast:
    return make_cast()


def session_cookie(user: User) -> str:
    client = Client()
    client.force_login(user)
    return f"sessionid={client.cookies['sessionid'].value}"


@contextmanager
def socket(site: Site, user: User | None, origin: str | None = None) -> Iterator[ClientConnection]:
    headers = {"Cookie": session_cookie(user)} if user else {}
    with connect(
        f"ws://localhost:{site.port}/ws/chat",
        additional_headers=headers,
        origin=origin or site.url,  # type: ignore[arg-type]  # a NewType of str
        proxy=None,
    ) as connection:
        yield connection


def say(connection: ClientConnection, **frame: Any) -> None:
    connection.send(json.dumps(frame))


def hear(connection: ClientConnection) -> dict[str, Any]:
    return json.loads(connection.recv(timeout=30))


def hear_until(connection: ClientConnection, generation: str, *kinds: str) -> list[dict[str, Any]]:
    frames = []
    while not frames or frames[-1]["type"] not in kinds:
        frame = hear(connection)
        if frame["id"] == generation:
            frames.append(frame)
    return frames


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "delta")


def start(generation: str, max_tokens: int = 10, **params: Any) -> dict[str, Any]:
    return {
        "type": "start",
        "id": generation,
        "model": MODEL,
        "messages": HELLO,
        "params": {"max_tokens": max_tokens, "seed": 1, **params},
    }


def test_a_generation_from_start_to_done(site, cast):
    with socket(site, cast.member) as connection:
        say(connection, **start("g1"))
        frames = hear_until(connection, "g1", "done", "error")
    assert [frames[0]["type"], frames[-2]["type"], frames[-1]["type"]] == ["started", "usage", "done"]
    assert frames[0]["model"] == MODEL
    assert len(text_of(frames)) == 10
    seq = 0
    for delta in frames[1:-2]:
        assert delta["seq"] == seq
        seq += delta["tokens"]
    usage = frames[-2]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (frames[0]["prompt_tokens"], 10)
    assert usage["tokens_per_second"] > 0
    assert usage["ttft_ms"] >= 0
    assert frames[-1]["finish_reason"] == "length"


def test_stop(site, cast):
    with socket(site, cast.member) as connection:
        say(connection, **start("g1", 3000))
        hear_until(connection, "g1", "delta")
        say(connection, type="stop", id="g1")
        frames = hear_until(connection, "g1", "done", "error")
        assert frames[-1]["finish_reason"] == "cancelled"
        assert 0 < frames[-2]["completion_tokens"] < 3000
        say(connection, **start("g1"))  # the id is free again
        assert hear_until(connection, "g1", "done", "error")[-1]["type"] == "done"


def test_a_refused_frame_does_not_end_the_generation_that_it_names(site, cast):
    with socket(site, cast.member) as connection:
        say(connection, **start("g1", 3000))
        hear_until(connection, "g1", "delta")
        resumed = {"type": "resume", "id": "g1", "request_id": "wschat-1", "model": MODEL}
        refused = (
            (start("g1"), "generation_id_in_use"),
            (resumed, "generation_id_in_use"),
            ({"type": "stop", "id": "g1", "reason": "bored"}, "invalid_request"),
        )
        for frame, code in refused:
            say(connection, **frame)
            while (told := hear(connection))["type"] != "error":
                assert told["id"] == "g1"
            assert (told["id"], told["refused_id"], told["error"]["code"]) == (None, "g1", code)
        hear_until(connection, "g1", "delta")
        say(connection, type="stop", id="g1")
        frames = hear_until(connection, "g1", "done", "error")
        assert frames[-1]["finish_reason"] == "cancelled"


def test_a_stop_is_answered_whether_or_not_there_is_something_to_stop(site, cast):
    with socket(site, cast.member) as connection:
        for name in ("never", "ended"):
            if name == "ended":
                say(connection, **start(name, 1))
                hear_until(connection, name, "done")
            say(connection, type="stop", id=name)
            told = hear(connection)
            assert (told["type"], told["id"], told["refused_id"]) == ("error", None, name)
            assert (told["error"]["code"], told["error"]["param"]) == ("generation_not_found", "id")
        # In the same breath: the second finds the first still being prepared.
        say(connection, **start("g1", 3000))
        say(connection, type="stop", id="g1")
        assert hear_until(connection, "g1", "done", "error")[-1]["finish_reason"] == "cancelled"
        say(connection, **start("g1"))
        assert hear_until(connection, "g1", "done", "error")[-1]["finish_reason"] == "length"


def test_who_waits_for_a_model_that_is_unloaded_hears_it_at_once(site, cast):
    card = structs.replace(a_card(), chat_template="{{ messages[0]['content'] }}")
    asyncio.run(as_its_worker(card, loads=True))
    with socket(site, cast.member) as connection:
        deadline = time.monotonic() + 30
        while True:  # gateways look for new models once a second
            say(connection, **start("g1", 5) | {"model": card.model})
            if hear(connection)["type"] == "started":
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        asyncio.run(as_its_worker(card, loads=False))
        unloaded_at = time.monotonic()
        error = hear_until(connection, "g1", "done", "error")[-1]["error"]
        assert time.monotonic() - unloaded_at < HEARD_WITHIN_S
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "was unloaded" in error["message"]


def test_several_at_once(site, cast):
    with socket(site, cast.member) as connection:
        for name in ("a", "b", "c"):
            say(connection, **start(name, 8))
        texts: dict[str, str] = {"a": "", "b": "", "c": ""}
        done = set()
        while len(done) < 3:
            frame = hear(connection)
            if frame["type"] == "delta":
                texts[frame["id"]] += frame["text"]
            elif frame["type"] == "done":
                done.add(frame["id"])
    assert len(set(texts.values())) == 1
    assert len(texts["a"]) == 8


def test_a_dropped_connection_is_resumed(site, cast):
    with socket(site, cast.member) as connection:
        say(connection, **start("whole", 60))
        whole = text_of(hear_until(connection, "whole", "done", "error"))
        say(connection, **start("g1", 60))
        (started, *_, last) = hear_until(connection, "g1", "delta")
        seen = last["text"]
    # The first connection is gone in mid-answer.
    with socket(site, cast.member) as connection:
        say(
            connection,
            type="resume",
            id="again",
            request_id=started["request_id"],
            model=MODEL,
            from_seq=last["seq"] + last["tokens"],
        )
        frames = hear_until(connection, "again", "done", "error")
        assert seen + text_of(frames) == whole
        assert frames[-2]["completion_tokens"] == 60
        # Also when it has ended meanwhile: from the log.
        say(connection, type="resume", id="late", request_id=started["request_id"], model=MODEL, from_seq=0)
        late = hear_until(connection, "late", "done", "error")
        assert text_of(late) == whole
        # What comes at once was not made at once.
        assert (late[-2]["tokens_per_second"], late[-2]["ttft_ms"]) == (None, None)
        resume = {"type": "resume", "request_id": started["request_id"], "model": MODEL}
        for from_seq, end in ((60, "done"), (61, "error")):
            say(connection, **resume, id=f"at-{from_seq}", from_seq=from_seq)
            last = hear_until(connection, f"at-{from_seq}", "done", "error")[-1]
            assert last["type"] == end
        assert last["error"]["param"] == "from_seq"


def test_another_tenants_generation_is_not_there(site, cast):
    with socket(site, cast.member) as connection:
        say(connection, **start("g1", 30))
        started = hear(connection)
        with socket(site, cast.outsider) as other:
            say(other, type="resume", id="x", request_id=started["request_id"], model=MODEL, from_seq=0)
            assert hear(other)["error"]["code"] == "request_not_found"
            say(other, **start("y"), tenant=str(cast.tenant.public_id))
            assert hear(other)["error"]["code"] == "not_a_member"
        hear_until(connection, "g1", "done", "error")


@pytest.mark.parametrize("role", [Role.VIEWER, Role.BILLING])
def test_who_may_only_look_generates_nothing_and_reads_no_answer_on(site, cast, role):
    looker = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=looker, role=role)
    with socket(site, cast.member) as connection:
        say(connection, **start("g1"))
        begun, *_ = hear_until(connection, "g1", "done", "error")
    resume = {"type": "resume", "id": "g2", "model": MODEL, "request_id": begun["request_id"], "from_seq": 0}
    with socket(site, looker) as connection:
        for frame in (start("g1"), resume):
            say(connection, **frame)
            (answer,) = hear_until(connection, frame["id"], "done", "error", "started")
            assert (answer["type"], answer["error"]["code"]) == ("error", "insufficient_permissions")
    drain_usage_stream()
    assert UsageRecord.objects.filter(tenant=cast.tenant).count() == 1, "the member's own"


def test_of_a_suspended_tenant_nobody_chats(site, cast):
    suspend_tenant(actor=TEST, tenant=cast.tenant, reason="The invoice is open")
    with socket(site, cast.owner) as connection:
        say(connection, **start("g1"))
        (answer,) = hear_until(connection, "g1", "done", "error", "started")
    assert (answer["type"], answer["error"]["code"]) == ("error", "tenant_suspended")


def test_a_refusal_says_which_limit_and_when(site, cast):
    set_limit(cast.tenant, LimitMetric.REQUESTS, 1)
    with socket(site, cast.member) as connection:
        say(connection, **start("g1", 1))
        hear_until(connection, "g1", "done")
        say(connection, **start("g2", 1))
        (frame,) = hear_until(connection, "g2", "error", "done")
    assert frame["error"]["code"] == "rate_limit_exceeded"
    assert frame["retry_after_ms"] > 0


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ("nonsense", None),
        ('{"type":"dance"}', "type"),
        ('{"type":"start","id":"g"}', "model"),
        pytest.param("[" * 5000, None, id="deep"),
        (json.dumps(start("g", temperature=9)), "params.temperature"),
        (json.dumps(start("g", prompt_logprobs=1)), "params.prompt_logprobs"),
        (json.dumps(start("g") | {"messages": [{"role": "user"}]}), "messages[0].content"),
    ],
)
def test_bad_frames_are_answered_and_harm_nothing(site, cast, frame, param):
    with socket(site, cast.member) as connection:
        connection.send(frame)
        answer = hear(connection)
        assert (answer["type"], answer["error"]["param"]) == ("error", param)
        say(connection, **start("g1", 1))
        assert hear_until(connection, "g1", "done", "error")[-1]["type"] == "done"


def test_signed_out_and_foreign_origins(site, cast):
    with socket(site, None) as connection:
        assert hear(connection)["error"]["code"] == "signed_out"
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=10)
        assert closed.value.rcvd.code == 4401
    with pytest.raises(InvalidStatus), socket(site, cast.member, origin="http://evil.example"):
        pass


def test_the_usage_says_what_it_cost(site, cast):
    set_model_price(
        actor=TEST, model=MODEL, input_microusd_per_mtok=2_000_000, cached_input_microusd_per_mtok=2_000_000,
        output_microusd_per_mtok=3_000_000,
    )  # fmt: skip
    with socket(site, cast.member) as connection:
        say(connection, **start("g1", 10))
        frames = hear_until(connection, "g1", "done", "error")
    usage = next(frame for frame in frames if frame["type"] == "usage")
    assert usage["cost_microusd"] == 2 * usage["prompt_tokens"] + 3 * 10


def test_a_member_may_wait_longer_but_not_less(site, cast):
    make_tier("realtime")
    make_tier("batch")
    with socket(site, cast.member) as connection:
        say(connection, **start("slow", 5), tier="batch")
        assert hear_until(connection, "slow", "done", "error")[-1]["type"] == "done"
        for better in ("realtime", "none such"):
            say(connection, **start("fast", 5), tier=better)
            refused = hear_until(connection, "fast", "done", "error")[-1]["error"]
            assert refused["code"] == "tier_not_open"
            assert "batch" in refused["message"]
            assert "realtime" not in refused["message"]

    def of_batch() -> bool:
        drain_usage_stream()
        return UsageRecord.objects.filter(tenant=cast.tenant, tier="batch", completion_tokens=5).exists()

    wait_until(of_batch, "the ledger's row", site.log)
