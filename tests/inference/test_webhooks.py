"""Alerts by webhook: signed, once each, again until taken, and never to where a tenant must not reach."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network

import openai
import pytest
from django.core.exceptions import ValidationError
from django.db import connections
from django.utils import timezone

from inference import guarded_http
from inference.models import DeliveryState, WebhookDelivery, WebhookEndpoint
from inference.services import webhooks
from inference.services.alerts import raise_alerts
from inference.services.webhook_delivery import RETRY_AFTER, queue_deliveries, send_deliveries
from inference.tasks import alert as alert_task
from inference.tasks import send_webhooks
from tenants.models import AuditEntry
from tenants.principal import Calendar, LimitMetric, Scope
from tests.factories import TEST, make_key, make_tenant, make_user, set_limit
from tests.inference.test_alerts import use

LOOPBACK = [ip_network("127.0.0.0/8")]


@dataclass
class Receiver:
    """A real server that answers what it is told to, and keeps what it was sent."""

    answers: list[int] = field(default_factory=lambda: [200])
    headers: dict[str, str] = field(default_factory=dict)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            answers = receiver.answers
            self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture
def receiver(settings) -> Iterator[Receiver]:
    settings.WEBHOOK_NETWORKS = LOOPBACK
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def tenant(db):
    return make_tenant("Acme", owner=make_user())


def verify(
    endpoint: WebhookEndpoint, headers: dict[str, str], body: bytes, secret: str | None = None
) -> None:
    """By an implementation of Standard Webhooks that is not ours."""
    client = openai.OpenAI(api_key="none", webhook_secret=secret or webhooks.shown_secret(endpoint))
    client.webhooks.verify_signature(body.decode(), headers)


def tell(tenant) -> None:
    set_limit(tenant, LimitMetric.TOKENS, 100, calendar=Calendar.DAY)
    use(tenant, 60, timezone.now())


def test_an_alert_arrives_signed_and_once(tenant, receiver):
    """FAULTS 74, on the wire."""
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url=receiver.url)
    stranger = webhooks.create_webhook(actor=TEST, tenant=make_tenant(), url=receiver.url)
    tell(tenant)
    for _ in range(5):
        alert_task()
        send_webhooks()
    ((headers, body),) = receiver.got
    verify(endpoint, headers, body)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verify(stranger, headers, body)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verify(endpoint, headers, body + b" ")
    assert b'"type":"alert.budget"' in body
    assert b'"threshold":50' in body
    assert str(tenant.public_id).encode() in body
    delivery = WebhookDelivery.objects.for_tenant(tenant).get()
    assert (delivery.state, delivery.attempts, headers["webhook-id"]) == (
        "delivered",
        1,
        str(delivery.public_id),
    )
    assert delivery.log[0]["status"] == 200


def test_what_is_not_taken_comes_again_later_each_time(tenant, receiver):
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url=receiver.url, kinds=["budget"])
    receiver.answers = [500, 302, 200]
    receiver.headers = {"Location": "http://127.0.0.1:1/elsewhere"}
    tell(tenant)
    raise_alerts()
    now = timezone.now()
    assert queue_deliveries(now) == 1
    for wait, arrives in ((0, 0), (RETRY_AFTER[0], 0), (RETRY_AFTER[1], 1)):
        if wait:
            assert send_deliveries(now + timedelta(seconds=wait - 1)) == 0
        now += timedelta(seconds=wait)
        assert send_deliveries(now) == arrives
    assert [entry["status"] for entry in WebhookDelivery.objects.for_tenant(tenant).get().log] == [
        500,
        302,
        200,
    ]
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({body for _, body in receiver.got}) == 1
    for headers, body in receiver.got:
        verify(endpoint, headers, body)


def test_it_is_given_up_after_a_day_and_can_be_sent_again(tenant, receiver):
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url=receiver.url)
    receiver.answers = [503]
    webhooks.try_webhook(actor=TEST, endpoint=endpoint)
    now = timezone.now()
    for _ in range(20):
        send_deliveries(now)
        now += timedelta(days=1)
    delivery = webhooks.recent_deliveries(endpoint)[0]
    assert (delivery.state, delivery.attempts) == (DeliveryState.FAILED, len(RETRY_AFTER) + 1)
    assert len(receiver.got) == len(delivery.log) == len(RETRY_AFTER) + 1
    assert sum(RETRY_AFTER) > 70_000
    receiver.answers = [204]
    assert webhooks.redeliver(actor=TEST, delivery=delivery)
    assert not webhooks.redeliver(actor=TEST, delivery=delivery)
    assert send_deliveries() == 1
    assert b"webhook.test" in receiver.got[-1][1]


def test_a_name_that_is_not_found_is_taken_and_doubted(tenant, settings, monkeypatch):
    """It may be there tomorrow, or be known where it is sent from; but who mistyped it should not wait for the alert
    that never comes."""
    settings.WEBHOOK_NETWORKS = []

    def resolve(host, port, **_):
        if host == "slow.example":
            time.sleep(0.3)
        if host == "hooks.exmaple":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", port))]

    monkeypatch.setattr(guarded_http.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(webhooks, "_RESOLVE_S", 0.1)
    made = webhooks.create_webhook(actor=TEST, tenant=tenant, url="https://hooks.exmaple/weir")
    assert made.doubt == "hooks.exmaple is not found"

    def change(url: str, *, is_enabled: bool = True) -> str:
        return webhooks.change_webhook(
            actor=TEST, endpoint=made, url=url, kinds=[], is_enabled=is_enabled
        ).doubt

    assert change("https://slow.example/") == "slow.example was not looked up within 0.1 s"
    assert change("https://hooks.example/") == ""
    webhooks.try_webhook(actor=TEST, endpoint=made)
    change("https://hooks.exmaple/weir")
    assert send_deliveries() == 0
    tried = webhooks.last_attempts(tenant.pk)[made.pk]
    assert (tried.state, tried.log[-1]["error"]) == ("waiting", "the name is not found")


def test_who_answers_gone_gets_no_more(tenant, receiver):
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url=receiver.url)
    receiver.answers = [410]
    for _ in range(2):
        webhooks.try_webhook(actor=TEST, endpoint=endpoint)
    send_deliveries()
    endpoint.refresh_from_db()
    assert endpoint.disabled_reason == "it answered 410 Gone"
    assert len(receiver.got) == 1
    webhooks.change_webhook(actor=TEST, endpoint=endpoint, url=endpoint.url, kinds=[], is_enabled=True)
    receiver.answers = [200]
    assert send_deliveries() == 1


def test_a_rotation_signs_with_both_secrets_until_its_overlap_ends(tenant, receiver):
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url=receiver.url)
    old = webhooks.shown_secret(endpoint)
    endpoint = webhooks.rotate_webhook_secret(actor=TEST, endpoint=endpoint, overlap=timedelta(hours=1))
    new = webhooks.shown_secret(endpoint)
    assert old != new
    assert len(base64.b64decode(new.removeprefix("whsec_"))) == 32
    with pytest.raises(ValidationError, match="rotated before"):
        webhooks.rotate_webhook_secret(actor=TEST, endpoint=endpoint)
    webhooks.try_webhook(actor=TEST, endpoint=endpoint)
    assert send_deliveries() == 1
    for secret in (old, new):
        verify(endpoint, *receiver.got[-1], secret=secret)
    WebhookEndpoint.objects.filter(tenant=tenant).update(previous_until=timezone.now())
    webhooks.try_webhook(actor=TEST, endpoint=endpoint)
    assert send_deliveries() == 1
    verify(endpoint, *receiver.got[-1], secret=new)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verify(endpoint, *receiver.got[-1], secret=old)
    audited = AuditEntry.objects.filter(tenant=tenant, action__startswith="webhook.")
    assert set(audited.values_list("action", flat=True)) == {
        "webhook.created",
        "webhook.secret_rotated",
        "webhook.tried",
    }
    assert new not in str(list(audited.values("before", "after")))


@pytest.mark.django_db(transaction=True)
def test_many_senders_send_each_message_once(receiver):
    tenant = make_tenant()
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url=receiver.url)
    for _ in range(12):
        webhooks.try_webhook(actor=TEST, endpoint=endpoint)
    start = threading.Barrier(4)

    def send() -> None:
        try:
            start.wait(30)
            send_deliveries()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ids = [headers["webhook-id"] for headers, _ in receiver.got]
    assert (len(ids), len(set(ids))) == (12, 12)
    assert set(WebhookDelivery.objects.for_tenant(tenant).values_list("state", flat=True)) == {"delivered"}


def test_an_address_is_checked_when_it_is_given(tenant, settings):
    settings.WEBHOOK_NETWORKS = []
    for url in ("http://example.com", "ftp://example.com", "https://", "https://a:b@example.com", "https://x.y/ z",
                "https://example.com:99999", "https://example.com/#x", "https://exämple.com"):  # fmt: skip
        with pytest.raises(ValidationError):
            webhooks.create_webhook(actor=TEST, tenant=tenant, url=url)
    with pytest.raises(ValidationError):
        webhooks.create_webhook(actor=TEST, tenant=tenant, url="https://example.com", kinds=["all"])
    # What could never be sent to is refused by the rule that sending goes by, with its reason.
    for host in ("127.0.0.1:9", "localhost", "[::1]", "10.1.2.3", "2130706433", "169.254.169.254"):
        with pytest.raises(ValidationError, match="not in the public internet"):
            webhooks.create_webhook(actor=TEST, tenant=tenant, url=f"https://{host}/")
    known = webhooks.create_webhook(actor=TEST, tenant=tenant, url="https://nobody.invalid/")
    with pytest.raises(ValidationError, match="not in the public internet"):
        webhooks.change_webhook(
            actor=TEST, endpoint=known, url="https://127.0.0.1/", kinds=[], is_enabled=True
        )
    # It is judged again when something is sent: a name may lead elsewhere by then. The log tells no more.
    settings.WEBHOOK_NETWORKS = LOOPBACK
    endpoint = webhooks.create_webhook(actor=TEST, tenant=tenant, url="https://127.0.0.1:9/")
    settings.WEBHOOK_NETWORKS = []
    webhooks.change_webhook(actor=TEST, endpoint=endpoint, url=endpoint.url, kinds=[], is_enabled=False)
    webhooks.change_webhook(actor=TEST, endpoint=endpoint, url=endpoint.url, kinds=[], is_enabled=True)
    webhooks.try_webhook(actor=TEST, endpoint=endpoint)
    assert send_deliveries() == 0
    assert webhooks.recent_deliveries(endpoint)[0].log[0]["error"] == (
        "not sent: 127.0.0.1 is not in the public internet"
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://example.com:99999/", "a number from 1 to 65535"),
        ("https://example.com:0/", "a number from 1 to 65535"),
        ("https://example.com:abc/", "a number from 1 to 65535"),
        ("https://a:b@example.com/", "Leave out the user and password"),
        ("https://a@example.com:99999/", "Leave out the user and password"),
        ("https://example.com/#x", "Leave out what begins with #"),
        ("https://2001:db8::1/", "in square brackets"),
        ("https://[2001:db8::1/", "square brackets must hold an IPv6 address"),
        ("https://[example.com]/", "square brackets must hold an IPv6 address"),
    ],
)
def test_an_address_that_is_wrong_is_told_what_to_change(tenant, settings, url, told):
    settings.WEBHOOK_NETWORKS = []
    with pytest.raises(ValidationError, match=told):
        webhooks.create_webhook(actor=TEST, tenant=tenant, url=url)


@pytest.mark.django_db(transaction=True)
def test_through_the_api(http, key):
    tenant = make_tenant()
    http.headers["Authorization"] = f"Bearer {make_key(tenant, scopes=[Scope.ADMIN]).secret}"
    made = http.post("webhooks", json={"url": "https://example.com/weir", "kinds": ["budget"]})
    assert made.status_code == 201, made.text
    webhook_id, secret = made.json()["id"], made.json()["secret"]
    assert secret.startswith("whsec_")
    (listed,) = http.get("webhooks").json()["data"]
    assert "secret" not in listed
    lost = http.post("webhooks", json={"url": "https://nobody.invalid/"}).json()
    assert lost["warning"] == "nobody.invalid is not found"
    assert http.get(f"webhooks/{lost['id']}").json()["warning"] is None
    assert http.delete(f"webhooks/{lost['id']}").status_code == 200
    assert http.post("webhooks", json={"url": "http://example.com"}).json()["error"]["param"] == "url"
    told = http.post("webhooks", json={"url": "https://example.com/weir"}).json()["error"]
    assert (told["param"], told["message"]) == (
        "url",
        "Alerts go to this address already: change that endpoint.",
    )
    assert http.post(f"webhooks/{webhook_id}", json={"is_enabled": False}).json()["is_enabled"] is False
    rotated = http.post(f"webhooks/{webhook_id}/rotate", json={"overlap_s": 60}).json()
    assert rotated["secret"] not in ("", secret)
    assert http.post(f"webhooks/{webhook_id}/rotate", json={}).status_code == 400
    tried = http.post(f"webhooks/{webhook_id}/test", json={})
    assert (tried.status_code, tried.json()["state"]) == (202, "waiting")
    (delivery,) = http.get(f"webhooks/{webhook_id}/deliveries").json()["data"]
    assert (delivery["id"], delivery["alert"]) == (tried.json()["id"], None)
    assert http.get("alerts").json() == {"data": [], "object": "list"}
    inside = http.post("webhooks", json={"url": "https://10.0.0.7/hook"})
    assert (inside.status_code, inside.json()["error"]["param"]) == (400, "url")
    assert http.delete(f"webhooks/{webhook_id}").json()["deleted"] is True
    assert http.get(f"webhooks/{webhook_id}").json()["error"]["code"] == "webhook_not_found"
    entry = AuditEntry.objects.filter(tenant=tenant, action="webhook.created").earliest("id")
    assert (entry.actor_kind, entry.ip_address) == ("key", "127.0.0.1")
