"""What the engine measures, on a fake clock and with a real model, and what Prometheus gets of it."""

from __future__ import annotations

import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_worker import metrics
from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.errors import InvalidRequest
from engine_worker.engine.measurements import PHASES, Distribution
from engine_worker.engine.meter import Meter
from engine_worker.protocol import SamplingParams
from engine_worker.worker_config import WorkerConfig
from engine_worker.worker_status import status_of
from tests.engine_worker.engine.test_scheduler import compute, make, sequence
from tests.engine_worker.models import make_tiny_model
from tests.engine_worker.scripted_engine import ScriptedEngine


def test_a_distribution_counts_by_upper_bound():
    distribution = Distribution()
    distribution.add(0.001, 0.0011, 0.3)
    distribution.add(1e9)
    at = {
        bound: count for bound, count in zip(distribution.bounds, distribution.counts, strict=False) if count
    }
    assert at == {0.001: 1, 0.0025: 1, 0.5: 1}
    assert distribution.counts[-1] == 1
    assert distribution.recent(0.0, 0.5, 1.0) == (0.001, 0.3, 1e9)
    assert Distribution().recent(0.5) == (0.0,)


def test_the_times_of_a_request():
    now = 10.0
    meter = Meter(max_num_seqs=4, clock=lambda: now)
    scheduler, _ = make(budget=16)
    item = sequence(1, 40, max_tokens=3)
    meter.arrived(item)
    scheduler.add(item)
    now += 5.0  # in the queue
    for _ in range(5):
        plan = scheduler.schedule()
        now += 1.0
        compute(scheduler, plan)
        meter.book(plan, 1.0)
        item.take_output()
    meter.ended(item)
    # 40 tokens in chunks of 16: the third step gives the first token.
    assert meter.queue.recent(0.5) == (5.0,)
    assert meter.prefill.recent(0.5) == (3.0,)
    assert meter.time_to_first_token.recent(0.5) == (8.0,)
    assert meter.inter_token.recent(0.0, 1.0) == (1.0, 1.0)
    assert sum(meter.inter_token.counts) == 2
    assert meter.decode.recent(0.5) == (2.0,)
    assert meter.finished == {"length": 1}
    assert (meter.output_tokens, meter.scheduled_tokens, meter.sequence_steps) == (3, 42, 5)


def test_tokens_that_come_at_once_share_their_wait():
    meter, item = Meter(), sequence(1, 4, max_tokens=9)
    item.started_at = 1.0
    assert meter.tokens_came(item, 2, 3.0) == [0.0]
    assert meter.tokens_came(item, 1, 4.0) == [1.0]
    assert meter.tokens_came(item, 4, 6.0) == [0.5] * 4
    assert (meter.output_tokens, item.first_token_at, item.token_at) == (7, 3.0, 6.0)


@pytest.fixture
async def engine(tmp_path):
    config = EngineConfig(
        model_dir=make_tiny_model(tmp_path), block_size=4, num_kv_blocks=65, max_num_seqs=4, threads=1
    )
    engine = AsyncEngine(config)
    await engine.start()
    yield engine
    await engine.stop()


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(sample, second label's value) to value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model") == "tiny"
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


async def test_prometheus_gets_what_happened(engine):
    server = metrics.serve(lambda: {"tiny": engine}, host="127.0.0.1", port=0)
    try:
        for prompt in ([1] * 9, [1] * 9, [2, 3]):
            sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
            outputs = [output async for output in engine.generate("r", prompt, sampling)]
            assert outputs[-1].finish is not None
        with pytest.raises(InvalidRequest):
            await anext(engine.generate("bad", [], sampling))
        found = scrape(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    name = "weir_engine_"
    assert found[name + "requests_total", "length"] == 3
    assert found[name + "tokens_total", "prompt"] == 20
    assert found[name + "tokens_total", "output"] == 15
    assert found[name + "time_to_first_token_seconds_count", ""] == 3
    assert found[name + "inter_token_seconds_count", ""] == 12
    assert found[name + "inter_token_seconds_bucket", "+Inf"] == 12
    assert found[name + "slots", ""] == 4
    assert found[name + "steps_total", ""] == found[name + "sequence_steps_total", ""] == 15
    assert found[name + "peak_memory_bytes", ""] > 50 << 20
    assert found[name + "wasted_tokens_total", ""] == found[name + "swapped_blocks_total", ""] == 0
    assert found[name + "drafted_tokens_total", ""] == found[name + "accepted_tokens_total", ""] == 0
    blocks = [found[name + "kv_blocks", state] for state in ("used", "cached", "free")]
    assert sum(blocks) == engine.stats().kv_blocks_total
    spent = {phase: found[name + "phase_seconds_total", phase] for phase in PHASES}
    assert spent.pop("transfer") == 0  # nobody was swapped out
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(spent.values()) <= found[name + "step_seconds_sum", ""] * 1.5


def test_several_models_of_one_process_share_families():
    stats = ScriptedEngine().stats()
    engines = {name: SimpleNamespace(stats=lambda: stats, meter=Meter()) for name in ("a", "b")}
    engines["a"].meter.finished["stop"] = 3
    engines["b"].meter.finished["stop"] = 4
    families = list(metrics.ProcessCollector(lambda: engines).collect())
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "Prometheus takes a family once"
    by_model = {family.name: [sample.labels["model"] for sample in family.samples] for family in families}
    assert all({"a", "b"} == set(models) for name, models in by_model.items() if models)
    (requests,) = [family for family in families if family.name == "weir_engine_requests"]
    assert [(s.labels["model"], s.value) for s in requests.samples] == [("a", 3.0), ("b", 4.0)]


async def test_the_status_tells_quantiles_of_each_part(engine):
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    _ = [output async for output in engine.generate("r", [1] * 9, sampling)]
    config = WorkerConfig(model="tiny", redis_url="redis://unused")
    told = status_of(engine, config, "tiny", started_at_ms=1, draining=False)
    for quantiles in (told.queue_ms, told.prefill_ms, told.decode_ms, told.ttft_ms, told.itl_ms):
        assert len(quantiles) == 3
    assert told.ttft_ms[0] == pytest.approx(told.queue_ms[0] + told.prefill_ms[0])
    assert told.decode_ms[0] > 0


async def test_errors_are_counted_by_code(engine):
    def poison(core):
        execute = core.device.executor.runner.execute

        def fails(step):
            if any(item.sequence.request.request_id == "bad" for item in step):
                raise RuntimeError("this one only")
            return execute(step)

        core.device.executor.runner.execute = fails

    engine._commands.put(poison)
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    outputs = [output async for output in engine.generate("bad", [1, 2], sampling)]
    assert outputs[-1].finish.reason == "error"
    outputs = [output async for output in engine.generate("good", [1, 2], sampling)]
    assert outputs[-1].finish.reason in ("length", "stop")
    assert engine.meter.errors == {"engine_error": 1}
    assert engine.meter.finished["error"] == 1
