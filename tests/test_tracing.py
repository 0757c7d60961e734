"""One request through real processes: its trace from the client to the engine's phases, and what the logs say of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from django.db import connection
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.site import MODEL, ROOT, Site, running_site, wait_until
from tests.factories import make_key, make_tenant

PROMPT = "the-prompt-that-nobody-may-log"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


class Collector:
    """What an OpenTelemetry collector receives by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """With the name of the service that sent it."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    service = attributes(resource.resource)["service.name"]
                    collector.spans += [
                        (service, span) for scope in resource.scope_spans for span in scope.spans
                    ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def named(self, name: str) -> tuple[str, Any]:
        (found,) = ((service, span) for service, span in self.spans if span.name == name)
        return found


def attributes(holder: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in holder.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join(10)


@pytest.fixture(scope="module")
def site(
    collector: Collector,
    django_db_setup: None,
    django_db_blocker: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_TRACING", "true")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server.server_port}")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("WEIR_LOG_FORMAT", "json")
        with running_site(connection.settings_dict, tmp_path_factory.mktemp("traced-site")) as site:
            yield site


def ask(site: Site, **headers: str) -> httpx.Response:
    secret = make_key(make_tenant()).secret
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": PROMPT}]}
    return httpx.post(
        f"{site.url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {secret}", **headers},
        timeout=60,
    )


@pytest.mark.django_db(transaction=True)
def test_a_trace_leads_from_the_client_to_the_phases_of_the_engine(site: Site, collector: Collector):
    answer = ask(site, traceparent=f"00-{TRACE_ID}-{CLIENT_SPAN}-01")
    assert answer.status_code == 200
    wait_until(lambda: len(collector.spans) >= 7, "seven spans", site.log)
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE_ID}

    service, http = collector.named("POST v1/chat/completions")
    assert service == "weir-gateway"
    assert http.parent_span_id.hex() == CLIENT_SPAN
    assert attributes(http)["http.response.status_code"] == 200
    assert attributes(http)["weir.request_id"] == answer.headers["x-request-id"]

    _, chat = collector.named(f"chat {MODEL}")
    assert chat.parent_span_id == http.span_id
    said = attributes(chat)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.response.id"] == answer.json()["id"]
    assert said["gen_ai.request.max_tokens"] == said["gen_ai.usage.output_tokens"] == 5
    assert said["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]

    service, generate = collector.named(f"generate {MODEL}")
    assert service == "weir-engine-worker"
    assert generate.parent_span_id == chat.span_id
    assert attributes(generate)["weir.attempt"] == 1
    _, queue = collector.named("queue")
    assert queue.parent_span_id == chat.span_id
    phases = [collector.named(name)[1] for name in ("prefill", "decode")]
    assert all(phase.parent_span_id == generate.span_id for phase in phases)
    ends = [queue.end_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert ends == sorted(ends)
    # Five tokens at forty a second.
    assert phases[1].end_time_unix_nano - phases[1].start_time_unix_nano > 0.05e9
    _, reserve = collector.named("reserve")
    assert reserve.parent_span_id == http.span_id
    assert PROMPT not in str(collector.spans)

    collector.spans.clear()
    ask(site, traceparent=f"00-{TRACE_ID}-{CLIENT_SPAN}-00")  # the client does not sample
    ask(site)
    wait_until(lambda: len(collector.spans) >= 7, "seven spans", site.log)
    assert TRACE_ID not in {span.trace_id.hex() for _, span in collector.spans}


@pytest.mark.django_db(transaction=True)
def test_logs_are_json_with_the_id_of_the_request_in_both_processes(site: Site):
    """FAULTS 68 too, for the Celery worker: it drains this request's usage and says nothing of its text."""
    given = "my-own-request-id-17"
    answer = ask(site, **{"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given
    refused = ask(site, **{"X-Request-Id": given, "x-weir-deadline-s": PROMPT})
    assert refused.status_code == 400
    with site.log.open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "celery", "-q", "-A", "weir.celery", "call", "inference.tasks.drain_usage"],
            cwd=ROOT, env=site.env, stdout=subprocess.DEVNULL, stderr=log, check=True, timeout=60,
        )  # fmt: skip

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in site.log.read_text().splitlines() if line.strip()]

    def of_worker() -> list[dict[str, Any]]:
        return [line for line in lines() if line.get("http_request_id") == given]

    wait_until(lambda: bool(of_worker()), "the worker's line", site.log)
    (claimed,) = of_worker()
    assert claimed["event"] == "request_claimed"
    assert claimed["request_id"] == answer.json()["id"]
    ends = [line for line in lines() if line["event"] == "request_finished"]
    assert answer.json()["id"] in {line["request_id"] for line in ends}
    assert all({"event", "level", "timestamp"} <= set(line) for line in lines())
    assert PROMPT not in site.log.read_text()


def test_tracing_without_its_packages_says_what_to_install():
    hide = "import sys; sys.modules['opentelemetry.sdk'] = None\n"
    hidden = hide + "from engine_worker.tracing import set_up; set_up('x')"
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert "pip install 'weir[tracing]'" in done.stderr
