"""The whole platform at 1x, 2x and 10x of its capacity: what is left of its goodput, and what is lost.

    make bench-load                                       # two minutes each; about 10 minutes
    make bench-load ARGS="--seconds 60 --soak 3600 --soak-load 0.5"   # and an hour at half the capacity afterwards
    make bench-load ARGS="--model tiny --seconds 10"      # a random model: checks the benchmark, measures nothing

Starts the product in a scratch directory (`weir up`: PostgreSQL, Valkey, Celery, one worker, a gateway on the server
that production has, unless WEIR_SERVER names another), eight tenants. Capacity is what as many clients as the engine
has slots get through when each sends its next request as the last one ends. Then the load of `weir bench`, an open
loop: requests come at their times, Poisson, whatever became of those before, and nobody tries again. Lengths are
ShareGPT's, scaled (`--scale`). The tier promises a wait of at most 0.7 of the objective's time to the first token, the
rest is the engine's: who would wait longer is refused at once, or ended in the queue, with a Retry-After too. Client,
gateway and engine share the machine, so at 10x the refusals cost the engine processor time as well: `cores` of each
run says how much of it each process took.

goodput_10x_over_peak         answers a second within the objective at 10x, over the most at any load
refused_without_retry_after   refusals (429, 503) that do not say when to come back
lost                          requests without an answer or an error that says so, and answers that are not in the
                              ledger exactly once, with the tokens that the client was told
rss_slope_mb_per_hour         least squares over all our processes, of the soak, else of the 10x part (short: noisy);
                              each process's own, descriptors' and KV blocks' beside it

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from benchmarks.engine.measure import processor
from benchmarks.model import prepared
from engine_worker.broker import BrokerUnavailable
from weir.load.client import End, Outcome, Target, closed_loop, open_loop
from weir.load.mix import Mix
from weir.load.report import Objective, Report, percentiles, summarise
from weir.servers import PRODUCTION

MODEL = "bench"
TENANTS = 8
SAMPLE_S = 1.0
KV_EVERY = 10
WAIT_SHARE = 0.7
LEDGER_S = 90.0


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    rss_mb: dict[str, float]
    """By process name as `weir up` has it, with its children."""
    descriptors: dict[str, int]
    cpu_s: dict[str, float]
    """Processor time so far; the client's too."""
    kv_blocks: int | None
    """In use by running requests; asked for every so often."""

    @property
    def total_mb(self) -> float:
        return sum(self.rss_mb.values())


@dataclass
class Watch:
    """Samples memory, descriptors and processor time of the product's processes, in a thread of its own."""

    children_file: Path
    redis_url: str
    samples: list[Sample] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            rss: dict[str, float] = {}
            descriptors: dict[str, int] = {}
            cpu_s = {"client": time.process_time()}
            for pid, name, _ in json.loads(self.children_file.read_text()):
                try:
                    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
                    # Postgres's processes share most of their memory: counted once, by the first.
                    counted = family[:1] if name == "postgres" else family
                    rss[name] = sum(process.memory_info().rss for process in counted) / 2**20
                    descriptors[name] = sum(process.num_fds() for process in family)
                    cpu_s[name] = sum(sum(process.cpu_times()[:2]) for process in family)
                except psutil.NoSuchProcess:
                    continue
            self.samples.append(Sample(time.monotonic(), rss, descriptors, cpu_s, self._kv_blocks()))

    def _kv_blocks(self) -> int | None:
        if len(self.samples) % KV_EVERY:
            return None
        try:
            return asyncio.run(kv_in_use(self.redis_url))[0]
        except (
            BrokerUnavailable,
            ValueError,
        ):  # no worker at the moment: what is lost then, the outcomes tell
            return None

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def since(self, at_s: float) -> list[Sample]:
        return [sample for sample in self.samples if sample.at_s >= at_s]


def slope_per_hour(times_s: Sequence[float], values: Sequence[float]) -> float:
    if len(times_s) < 3:
        return 0.0
    return round(statistics.linear_regression(times_s, values).slope * 3600, 2)


def make_tenants(objective: Objective, slots: int) -> list[str]:
    """Keys of tenants whose limits do not bind; the tier promises what the objective asks for."""
    from tenants.models import Tier
    from tenants.services import Actor, create_tenant, issue_api_key

    tier = Tier.objects.get(name="standard")
    tier.max_wait_s = max(1, round(WAIT_SHARE * objective.ttft_s))
    tier.max_queued, tier.max_queued_per_tenant = 100 * slots, 20 * slots
    tier.save()
    actor = Actor.system("bench")
    tenants = [create_tenant(actor=actor, name=f"Bench {number}", tier=tier) for number in range(TENANTS)]
    return [issue_api_key(actor=actor, tenant=tenant, name="bench").secret for tenant in tenants]


def missing_in_ledger(outcomes: Sequence[Outcome]) -> list[str]:
    """Answered requests without their one right row, once the ledger had time to take them in."""
    from inference.models import UsageRecord

    told = {
        outcome.request_id: (outcome.prompt_tokens, outcome.output_tokens)
        for outcome in outcomes
        if outcome.end is End.DONE
    }
    deadline = time.monotonic() + LEDGER_S
    while True:
        rows: dict[str, list[tuple[int, int]]] = {}
        for request_id, *tokens in UsageRecord.unscoped.values_list(
            "request_id", "prompt_tokens", "completion_tokens"
        ):
            rows.setdefault(request_id, []).append((tokens[0], tokens[1]))
        wrong = [request_id for request_id, tokens in told.items() if rows.get(request_id) != [tokens]]
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(1)


def waits(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float, float]]:
    """What of the clients' time to the first token was the queue's and the engine's: P50, P90, P99, seconds. The rest
    was the gateway's and the client's own."""
    from inference.models import UsageRecord

    ids = [outcome.request_id for outcome in outcomes if outcome.end is End.DONE]
    rows = UsageRecord.unscoped.filter(request_id__in=ids, first_token_at__isnull=False)
    times = list(rows.values_list("created_at", "claimed_at", "first_token_at"))
    return {
        "queue_s": percentiles([(claimed - created).total_seconds() for created, claimed, _ in times]),
        "engine_s": percentiles([(first - claimed).total_seconds() for _, claimed, first in times]),
    }


async def kv_in_use(redis_url: str) -> tuple[int, int]:
    """KV blocks that running requests hold, and requests that the engine knows."""
    from engine_worker.broker import GatewayBroker

    broker = GatewayBroker(redis_url)
    try:
        (worker,) = await broker.workers()
        return worker.kv_blocks_used, worker.running + worker.waiting
    finally:
        await broker.aclose()


async def settled_kv(redis_url: str) -> int:
    """The blocks in use when the engine has nothing to do: 0, or some have leaked."""
    for _ in range(60):
        used, requests = await kv_in_use(redis_url)
        if requests == 0:
            await asyncio.sleep(2)  # a heartbeat later
            return (await kv_in_use(redis_url))[0]
        await asyncio.sleep(1)
    return used


class Bench:
    def __init__(self, arguments: argparse.Namespace, target: Target, mix: Mix, watch: Watch) -> None:
        self._arguments = arguments
        self._target, self._mix, self._watch = target, mix, watch
        self.objective = Objective(arguments.ttft_slo, arguments.itl_slo)
        self.all: list[Outcome] = []
        self.by_run: dict[str, list[Outcome]] = {}
        self.cores: dict[str, dict[str, float]] = {}

    def capacity(self) -> float:
        """Answers a second, with every slot of the engine taken."""
        seconds = self._arguments.seconds
        asks = self._mix.endless()
        slots = self._arguments.slots
        outcomes = uvloop.run(closed_loop(self._target, asks, clients=slots, duration_s=seconds))
        self.all += outcomes
        report = summarise(
            outcomes, duration_s=seconds, objective=self.objective, from_s=seconds * self._arguments.warm_up
        )
        print(f"capacity: {report.done_per_s:.2f} answers/s with {slots} at once")
        self._print(report)
        return report.done_per_s

    def run(self, name: str, rate: float, seconds: float) -> tuple[Report, list[Sample]]:
        began = time.monotonic()
        outcomes = uvloop.run(open_loop(self._target, self._mix.poisson(rate, seconds)))
        self.all += outcomes
        self.by_run[name] = outcomes
        report = summarise(
            outcomes, duration_s=seconds, objective=self.objective, from_s=seconds * self._arguments.warm_up
        )
        print(f"{name}: {rate:.2f} requests/s for {seconds:g} s")
        self._print(report)
        samples = self._watch.since(began)
        self.cores[name] = cores(samples)
        print(f"    cores      {', '.join(f'{who} {busy:g}' for who, busy in self.cores[name].items())}")
        for error in sorted({outcome.error for outcome in outcomes if outcome.end in (End.FAILED, End.LOST)})[
            :3
        ]:
            print(f"    {error}")
        return report, samples

    def _print(self, report: Report) -> None:
        for line in report.lines():
            print(f"    {line}", flush=True)


def memory(samples: Sequence[Sample]) -> dict[str, object]:
    """Slopes without the first fifth, in which buffers grow to their size."""
    settled = samples[len(samples) // 5 :]
    times = [sample.at_s for sample in settled]
    names = sorted({name for sample in settled for name in sample.rss_mb})
    return {
        "rss_slope_mb_per_hour": slope_per_hour(times, [sample.total_mb for sample in settled]),
        "descriptor_slope_per_hour": slope_per_hour(
            times, [sum(sample.descriptors.values()) for sample in settled]
        ),
        "kv_block_slope_per_hour": slope_per_hour(
            [sample.at_s for sample in settled if sample.kv_blocks is not None],
            [sample.kv_blocks for sample in settled if sample.kv_blocks is not None],
        ),
        "rss_mb": {name: round(settled[-1].rss_mb.get(name, 0.0)) for name in names} if settled else {},
        "rss_slope_by_process": {
            name: slope_per_hour(times, [sample.rss_mb.get(name, 0.0) for sample in settled])
            for name in names
        },
        "descriptor_slope_by_process": {
            name: slope_per_hour(times, [sample.descriptors.get(name, 0) for sample in settled])
            for name in names
        },
    }


def cores(samples: Sequence[Sample]) -> dict[str, float]:
    """How many processor cores each process kept busy, the client too."""
    if len(samples) < 2:
        return {}
    first, last = samples[0], samples[-1]
    return {
        name: round((spent - first.cpu_s.get(name, 0.0)) / (last.at_s - first.at_s), 2)
        for name, spent in last.cpu_s.items()
    }


def bench(arguments: argparse.Namespace, scratch: Path, base_url: str) -> dict[str, object]:
    os.environ["WEIR_VAR_DIR"] = str(scratch / "var")
    import django

    django.setup()
    from weir import places

    redis_url = places.redis_url(scratch / "var")
    objective = Objective(arguments.ttft_slo, arguments.itl_slo)
    target = Target(base_url, make_tenants(objective, arguments.slots), MODEL)
    mix = Mix(seed=arguments.seed, scale=arguments.scale, most_tokens=arguments.most_tokens)
    reports: dict[str, Report] = {}
    with Watch(scratch / "var" / "run" / "children.json", redis_url) as watch:
        bench = Bench(arguments, target, mix, watch)
        capacity = bench.capacity()
        if not capacity:
            sys.exit("nothing was answered: see the errors above")
        samples: list[Sample] = []
        for factor in arguments.factors:
            reports[f"{factor:g}x"], samples = bench.run(f"{factor:g}x", factor * capacity, arguments.seconds)
        kv_after = asyncio.run(settled_kv(redis_url))
        if arguments.soak:
            reports["soak"], samples = bench.run("soak", arguments.soak_load * capacity, arguments.soak)
            kv_after = asyncio.run(settled_kv(redis_url))
    wrong = missing_in_ledger(bench.all)
    for request_id in wrong[:5]:
        print(f"    not in the ledger as it was answered: {request_id}")
    peak = max(report.goodput_per_s for name, report in reports.items() if name != "soak")
    last = reports[f"{arguments.factors[-1]:g}x"]
    return {
        "goodput_10x_over_peak": round(last.goodput_per_s / peak, 3) if peak else 0.0,
        "lost": sum(outcome.end is End.LOST for outcome in bench.all) + len(wrong),
        "failed": sum(outcome.end is End.FAILED for outcome in bench.all),
        "refused_without_retry_after": sum(
            outcome.end is End.REFUSED and not outcome.retry_after for outcome in bench.all
        ),
        **memory(samples),
        "kv_blocks_in_use_when_idle": kv_after,
        "capacity_per_s": capacity,
        "factors": arguments.factors,
        "seconds": arguments.seconds,
        "soak_s": arguments.soak,
        "runs": {
            name: report.as_json() | {"of_ttft": waits(bench.by_run[name]), "cores": bench.cores[name]}
            for name, report in reports.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of each part")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds at `--soak-load` afterwards")
    parser.add_argument("--soak-load", type=float, default=0.8, help="of the capacity")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 2.0, 10.0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="or a directory, or `tiny`")
    parser.add_argument("--scale", type=float, default=0.25, help="of ShareGPT's lengths")
    parser.add_argument("--most-tokens", type=int, default=400)
    parser.add_argument("--slots", type=int, default=32, help="sequences at once in the engine")
    parser.add_argument("--ttft-slo", type=float, default=10.0)
    parser.add_argument("--itl-slo", type=float, default=0.5)
    parser.add_argument(
        "--warm-up", type=float, default=0.15, help="share of each part that counts for no rate"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from benchmarks.fleet import tiny_model
    from benchmarks.serve import platform_running

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the product ends with its benchmark
    os.environ["WEIR_MAX_NUM_SEQS"] = str(arguments.slots)
    os.environ.setdefault("WEIR_SERVER", PRODUCTION)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as directory:
        scratch = Path(directory)
        scratch.chmod(0o755)
        if arguments.model == "tiny":
            model_dir = tiny_model(scratch, positions=8192)
            template = "{% for message in messages %}{{ message.content }}{% endfor %}"
            (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        else:
            model_dir = prepared(arguments.model)
        print(
            f"{processor()}, {os.cpu_count()} CPUs; {model_dir.name}; ShareGPT's lengths times {arguments.scale:g}; "
            f"good: TTFT <= {arguments.ttft_slo:g} s and mean ITL <= {arguments.itl_slo:g} s",
            flush=True,
        )
        with platform_running(model_dir, scratch) as (base_url, _):
            results = bench(arguments, scratch, base_url)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
