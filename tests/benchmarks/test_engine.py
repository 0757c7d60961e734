"""What `make bench-engine` says: its JSON, its peers' names, who is left out. Contestants are small processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import __main__ as benchmark
from benchmarks.engine import workload
from benchmarks.engine.contestant import Contestant, Options
from benchmarks.engine.field import Field
from benchmarks.engine.peers import PEERS, REQUIREMENTS
from benchmarks.engine.workload import Chat
from engine_worker.config import EngineConfig
from tests.engine_worker.models import make_tiny_model

CHATS = [Chat([1, 2], 3), Chat([4], 5)]
DEFAULT = EngineConfig.__dataclass_fields__["precision"].default
_CONTESTANT = f"""#!{sys.executable}
import json, sys

settings = json.loads(sys.argv[4])["settings"]
for turn, line in enumerate(sys.stdin):
    if turn == settings.get("turns"):
        sys.exit(3)
    chats = json.loads(line)
    outputs = [[7] * chat["output_tokens"] for chat in chats]
    wall_s = settings.get("wall_s", 1)
    print(json.dumps(dict(wall_s=wall_s, outputs=outputs, finished_s=[wall_s] * len(chats))), flush=True)
"""


@pytest.fixture
def started() -> list[Contestant]:
    return []


@pytest.fixture
def starting(tmp_path, started) -> Callable[..., Callable[..., Contestant]]:
    """What starts a contestant that makes tokens at once, and ends after so many turns; the first warms it up."""
    python = tmp_path / "contestant"
    python.write_text(_CONTESTANT)
    python.chmod(0o755)

    def settle(**settings: Any) -> Callable[..., Contestant]:
        def start(*_: Any, **__: Any) -> Contestant:
            started.append(Contestant("small", Options("", 1, "fp32", settings=settings), python))
            return started[-1]

        return start

    return settle


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_peer_that_dies_is_left_out_and_named(starting, started, capfd, one_at_a_time):
    starts = {"ours-fp32": starting(), "still-born": starting(turns=0), "frail": starting(turns=1)}
    field = Field(starts | {"steady": starting()}, ["ours-fp32"], one_at_a_time)
    try:
        for _ in range(2):
            made = field.run(CHATS)
            assert list(made) == field.names == ["ours-fp32", "steady"]
            assert [len(tokens) for tokens in made["steady"].outputs] == [3, 5]
    finally:
        field.stop()
    told = capfd.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in told] == [["left out", "still-born"], ["left out", "frail"]]
    assert all("small ended with exit code 3" in line for line in told)
    assert len(started) == (6 if one_at_a_time else 4)
    assert all(contestant._process.poll() is not None for contestant in started)


def test_a_peer_that_dies_in_a_later_round_is_in_no_figure(starting, capfd):
    field = Field({"ours-fp32": starting(), "frail": starting(turns=2)}, ["ours-fp32"], one_at_a_time=False)
    try:
        result = benchmark.compare("single", field, rounds=2)
    finally:
        field.stop()
    assert list(result["engines"]) == ["ours-fp32"]
    assert result["ratios_fp32"] == {}
    assert "left out: frail" in capfd.readouterr().out


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_ours_may_not_die(starting, one_at_a_time):
    field = Field({"ours-fp32": starting(turns=1)}, ["ours-fp32"], one_at_a_time)
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        field.run(CHATS)
    field.stop()


def test_each_peer_can_be_started_by_its_name():
    for name, peer in PEERS.items():
        assert find_spec(f"benchmarks.engine.engines.{peer.module}"), name
        assert peer.venv is None or peer.venv in REQUIREMENTS, name


def test_the_last_line_has_the_ratios_of_each_precision(starting, monkeypatch, capfd):
    speeds = {"fp32": 4.0, DEFAULT: 1.0, "int8": 0.5}

    def ours(model_dir: Path, threads: int, precision: str) -> Contestant:
        return starting(wall_s=speeds[precision])()

    class Small:
        is_installed = True
        start = staticmethod(starting(wall_s=2.0))

    monkeypatch.setattr(benchmark, "ours", ours)
    monkeypatch.setattr(benchmark, "prepared", Path)
    monkeypatch.setattr(benchmark, "PEERS", {"one": Small, "two": Small})
    monkeypatch.setattr(
        sys, "argv", ["bench", "--model", "m", "--rounds", "1", "--workloads", "single", "w20", "mixed"]
    )
    benchmark.main()
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["precision"] == DEFAULT
    for key, ratio in (("ratios", 2.0), ("ratios_fp32", 0.5), ("ratios_int8", 4.0)):
        assert told[key] == {"1": {"one": ratio, "two": ratio}, "20": {"one": ratio, "two": ratio}}
        assert told["workloads"]["mixed"][key] == {"one": ratio, "two": ratio}
    assert set(told) == {"precision", "workloads", "ratios", "ratios_fp32", "ratios_int8"}
    assert list(told["workloads"]["w20"]["engines"]) == ["ours-fp32", "ours-fp16", "ours-int8", "one", "two"]


def test_a_run_of_the_smallest_workload(tmp_path, monkeypatch, capfd):
    """Of the real engine, without a peer; with tokens that the tiny model has."""
    model_dir = make_tiny_model(tmp_path)
    monkeypatch.setattr(workload, "load", lambda name: [Chat([7, 50, 101], 6)])
    options = ("--workloads", "single", "--rounds", "1", "--peers", "none", "--precisions", "fp32")
    monkeypatch.setattr(sys, "argv", ["bench", "--model", str(model_dir), "--threads", "1", *options])
    benchmark.main()
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (told["precision"], told["ratios_fp32"]) == (DEFAULT, {"1": {}})
    assert "ratios" not in told, "it did not run"
    engines = told["workloads"]["single"]["engines"]
    assert list(engines) == ["ours-fp32"]
    assert engines["ours-fp32"].keys() >= {
        "tokens_per_s", "wall_s", "latency_p50_s", "latency_p99_s", "ttft_p50_s", "itl_ms", "peak_memory_mb",
    }  # fmt: skip
    assert engines["ours-fp32"]["tokens_per_s"] > 0
    assert engines["ours-fp32"]["requests_as_exact"] == 1
