"""What Prometheus gets of a gateway and of Celery, from the real processes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from django.db import connection
from prometheus_client.parser import text_string_to_metric_families

from engine_worker.engine.meter import Meter
from engine_worker.metrics import ProcessCollector
from inference.metrics import route_of
from tests.e2e.site import MODEL, ROOT, Site, running_site, wait_until
from tests.factories import make_key, make_tenant

TOKEN = "scrape-me-if-you-can"
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def site(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_METRICS_TOKEN", TOKEN)
        with running_site(connection.settings_dict, tmp_path_factory.mktemp("metrics-site")) as site:
            yield site


def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10)
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.mark.django_db(transaction=True)
def test_a_gateway_counts_streams_to_their_end(site: Site):
    secret = make_key(make_tenant()).secret
    route = "v1/chat/completions"
    before = scrape(f"{site.url}/metrics")

    def grown(now: dict[Any, float], which: Any) -> float:
        return now.get(which, 0) - before.get(which, 0)

    for _ in range(2):
        body = {
            "model": MODEL,
            "stream": True,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "hi"}],
        }
        answer = httpx.post(
            f"{site.url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
    httpx.get(f"{site.url}/v1/of-nobody/{secret}", timeout=10)
    ended = key("weir_http_requests_total", route=route, method="POST", status="200")
    # A client has the last byte before the gateway has counted it.
    wait_until(lambda: grown(scrape(f"{site.url}/metrics"), ended) == 2, "two streams counted", site.log, 10)
    after = scrape(f"{site.url}/metrics")
    assert grown(after, key("weir_http_first_byte_seconds_count", route=route)) == 2
    # Eight tokens at forty a second.
    assert grown(after, key("weir_http_request_duration_seconds_sum", route=route)) > 2 * 0.1
    assert after[key("weir_http_requests_in_progress")] == 1, "the scrape itself"
    # Other sites of a full run serve a model of this name from the same Redis, and may not have lapsed yet.
    assert after[key("weir_workers", model=MODEL, state="serving")] >= 1
    assert after[key("weir_redis_up")] == 1
    assert grown(after, key("weir_event_loop_lag_seconds_count")) > 0
    assert secret not in str(after), "a path is not a label"


@pytest.mark.django_db(transaction=True)
def test_a_drain_ends_when_the_last_open_answer_has(site: Site):
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 600,
        "messages": [{"role": "user", "content": "hi"}],
    }
    bearer = {"Authorization": f"Bearer {make_key(make_tenant()).secret}"}
    drain = [sys.executable, "manage.py", "drain", "--url", site.url, "--settle", "0"]
    with httpx.stream(
        "POST", f"{site.url}/v1/chat/completions", json=body, headers=bearer, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        draining = subprocess.Popen(
            [*drain, "--timeout", "100"], cwd=ROOT, env=site.env, stdout=subprocess.PIPE, text=True
        )
        try:
            assert draining.stdout
            assert draining.stdout.readline() == "1 still open\n"
            assert draining.poll() is None
            assert any(line == "data: [DONE]" for line in lines)
            assert draining.wait(60) == 0
        finally:
            draining.kill()
            draining.communicate()


def test_without_the_token_there_is_no_such_page(site: Site):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \u00e9".encode()}):
        assert httpx.get(f"{site.url}/metrics", headers=headers, timeout=10).status_code == 404


@pytest.mark.parametrize(
    "path", ["/admin/tenants/user/17/", "/admin/x", "/v1/nope/12", "/no/such/page/17", "/static/a"]
)
def test_no_path_makes_a_label_of_its_own(path: str):
    assert not re.search(r"\d{2}|nope|such", route_of(path))


@pytest.mark.django_db
def test_celery_sums_over_its_processes(site: Site, tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = site.env | {
        "WEIR_CELERY_METRICS_PORT": str(port),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "counts"),
    }
    task = "inference.tasks.drain_usage"
    # Other tests' tasks may be left on this server.
    send = (
        "from weir.celery import app\nfrom inference.tasks import drain_usage\n"
        "app.control.purge()\nfor _ in range(6): drain_usage.delay()"
    )
    subprocess.run(
        [sys.executable, "manage.py", "shell", "-c", send], cwd=ROOT, env=site.env, check=True, timeout=60
    )
    log = (tmp_path / "celery.log").open("wb")
    celery = subprocess.Popen(
        [sys.executable, "-m", "celery", "-q", "-A", "weir.celery", "worker", "--concurrency", "2"],
        cwd=ROOT, env=env, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        done = 0.0
        deadline = time.monotonic() + 60
        while done < 6 and time.monotonic() < deadline:
            time.sleep(0.3)
            try:
                found = scrape(f"http://127.0.0.1:{port}/metrics")
            except httpx.TransportError:
                continue
            done = found.get(key("weir_celery_tasks_total", task=task, state="success"), 0)
        assert done == 6, (tmp_path / "celery.log").read_text()
        assert found[key("weir_celery_task_duration_seconds_count", task=task)] == 6
        assert time.time() - found[key("weir_celery_task_last_success_timestamp_seconds", task=task)] < 90
    finally:
        celery.terminate()
        celery.wait(90)
        log.close()
    assert len(list((tmp_path / "counts").glob("counter_*.db"))) >= 2, "two processes shared the work"


def exported() -> set[str]:
    """Every sample name that our processes export, read from the objects that do it."""
    from prometheus_client import REGISTRY

    from inference.metrics import _QueueCollector
    from weir import celery_metrics

    assert celery_metrics.TASKS

    class Stats:
        def __getattr__(self, _: str) -> int:
            return 0

    class Engine:
        meter = Meter(max_num_seqs=1)

        def stats(self) -> Any:
            return Stats()

    families = [*REGISTRY.collect(), *ProcessCollector(lambda: {"m": Engine()}).collect()]  # type: ignore[dict-item]
    families += _QueueCollector({"models": [], "workers": []}).collect()
    names = set()
    for family in families:
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


DASHBOARD = json.loads((DEPLOY / "grafana" / "weir.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", [*QUERIES, *(alert["expr"] for alert in ALERTS)])
def test_a_query_names_metrics_that_exist(query: str):
    named = set(re.findall(r"\bweir_\w+", query))
    assert named
    assert named <= exported()
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


def test_the_check_would_notice():
    assert "weir_http_request_total" not in exported()
    assert "weir_engine_time_to_first_token_seconds_bucket" in exported()


def test_alerts_have_what_prometheus_and_people_need():
    assert {tuple(group) for group in RULES["groups"]} == {("name", "rules")}
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert set(alert) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", alert["for"])
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert set(alert["annotations"]) == {"summary", "what_to_do"}


def test_panels_have_places_of_their_own():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not mine & cells
        assert max(x for x, _ in mine) < 24
        cells |= mine
