"""`weir bench` against the real gateway; the mix and the arithmetic of its report."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from itertools import islice, pairwise

import pytest

from tenants.principal import LimitMetric
from tests.e2e.site import MODEL, ROOT, Site
from tests.factories import make_key, make_tenant, set_limit
from weir.load.client import End, Outcome, Target, open_loop
from weir.load.mix import Ask, Mix
from weir.load.report import Objective, summarise


def bench(site: Site, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "WEIR_API_KEY"}
    return subprocess.run(
        [sys.executable, "manage.py", "bench", "--url", site.url, *arguments],
        cwd=ROOT,
        env=kept | {"WEIR_API_KEY": key},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_run_is_told_in_full_and_ends_in_the_ledger_of_the_key(site: Site, key: str):
    short = ("--rate", "6", "--duration", "2", "--prompt-tokens", "8", "--output-tokens", "6")
    done = bench(site, *short, "--json", key=key)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sent"] == report["done"] > 3
    assert report["lost"] == report["failed"] == report["refused"] == 0
    assert 0 < report["ttft_s"][0] <= report["ttft_s"][2]
    assert report["itl_s"][0] > 0


def test_what_a_person_forgot_is_said(site: Site, key: str):
    assert "WEIR_API_KEY" in bench(site).stderr
    wrong = bench(site, key="sk-wrong")
    assert wrong.returncode == 1
    assert "does not list models" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_refusals_are_told_apart_from_losses(site: Site, transactional_db: None):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 2)
    target = Target(site.url, [make_key(tenant).secret], MODEL)
    asks = [Ask(at_s=0.01 * number, prompt="word", output_tokens=3) for number in range(5)]
    outcomes = asyncio.run(open_loop(target, asks))
    assert [outcome.end for outcome in outcomes].count(End.DONE) == 2
    refused = [outcome for outcome in outcomes if outcome.end is End.REFUSED]
    assert [(outcome.status, outcome.retry_after) for outcome in refused] == [(429, True)] * 3
    nobody = Target("http://127.0.0.1:9", ["none"], MODEL)
    (lost,) = asyncio.run(open_loop(nobody, asks[:1]))
    assert lost.end is End.LOST
    assert lost.error


def test_the_mix_follows_from_its_seed_and_has_the_means_that_it_names():
    mix = Mix(seed=7, most_tokens=100_000)
    assert list(islice(mix.endless(), 20)) == list(islice(mix.endless(), 20))
    assert list(islice(Mix(seed=8).endless(), 20)) != list(islice(mix.endless(), 20))
    asks = list(mix.poisson(rate=10, duration_s=1000))
    gaps = [late.at_s - early.at_s for early, late in pairwise(asks)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.05), "Poisson: as much as the mean"
    assert statistics.mean(ask.output_tokens for ask in asks) == pytest.approx(338, rel=0.05)
    assert statistics.mean(len(ask.prompt.split()) - 1 for ask in asks) == pytest.approx(161, rel=0.05)
    assert max(ask.output_tokens for ask in Mix(most_tokens=50).poisson(10, 100)) == 50


def test_goodput_counts_what_was_good_and_in_time():
    def done(at_s: float, first_s: float, last_s: float, tokens: int = 11) -> Outcome:
        return Outcome(
            at_s, End.DONE, 200, False, "id", "", 5, tokens, token_at_s=[first_s, last_s], finished_s=last_s
        )

    outcomes = [
        done(0.0, 0.5, 1.5),
        done(0.0, 3.0, 4.0),  # late first token
        done(1.0, 1.5, 9.0),  # slow tokens
        done(9.0, 9.5, 10.5),  # good, but drained after the end
        Outcome(2.0, End.REFUSED, 503, retry_after=True),
        Outcome(2.0, End.REFUSED, 429, retry_after=False),
        Outcome(2.0, End.LOST),
    ]
    report = summarise(outcomes, duration_s=10, objective=Objective(ttft_s=1.0, itl_s=0.2))
    assert (report.sent, report.done, report.refused, report.lost) == (7, 4, 2, 1)
    assert report.refused_without_retry_after == 1
    assert report.goodput_per_s == 0.1
    assert report.done_per_s == 0.3
    assert report.good_share == 0.5
    assert report.output_tokens_per_s == 3.3
    assert report.ttft_s[0] in (0.5, 3.0)
