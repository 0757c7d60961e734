"""What the gateway costs a request, beside LiteLLM's proxy and Portkey's gateway, in one call.

    make bench-gateway                          (about five minutes, and the installation of the peers the first time)
    make bench-gateway ARGS="--rounds 1 --seconds 2 --peers '' --servers uvicorn"

Ours is the whole path: key, validation, template and tokenising, reservation from three limits, queue, worker (the
real one, around an engine that computes nothing), token log, live channel, ledger. LiteLLM's proxy has one virtual
master key, no database, and an upstream that answers at once; Portkey's gateway the same upstream, and neither keys nor
limits; plain alone, because it fails to stream under Node 20. All answer with 20 tokens, a stream in as many chunks.
Closed loops of 1 and of 32 keep-alive connections, plain and streamed; in each round everybody has a turn. Everything
shares the machine, as one gateway process per server. `floor` is a bare ASGI application on uvicorn that asks the same
Redis once and computes nothing: what is above it is the product.

The last line is JSON: `rps_ratio` is ours on the production server over LiteLLM's at 32 connections, the smaller of
plain and streamed, `portkey_plain_rps_ratio` ours over Portkey's, plain; `added_p50_ratio` the greater of plain and
streamed of P50 at one connection over LiteLLM's, less what the upstream itself takes where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.measure import percentile, processor
from benchmarks.gateway import litellm, portkey
from benchmarks.gateway.load import Aim, Result
from benchmarks.gateway.product import (
    HELD,
    HELD_STEP_S,
    MODEL,
    ROOT,
    Product,
    answers,
    free_port,
    running_product,
)
from benchmarks.model import prepared
from weir.servers import GRANIAN, SERVERS, UVICORN

CHUNKS = 20
_INSTALLED = {"litellm": litellm.installed, "portkey": portkey.installed}
_CASES = [(streamed, connections) for streamed in (False, True) for connections in (1, 32)]


def measured(aim: Aim) -> Result:
    """One load, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="weir-load-") as directory:
        result = Path(directory) / "result.json"
        done = subprocess.run(
            _loading(aim, result), cwd=ROOT, capture_output=True, text=True, timeout=aim.seconds + 120
        )
        if done.returncode:
            sys.exit(f"the load failed: {done.stderr}")
        return Result(**json.loads(result.read_text()))


def _loading(aim: Aim, result: Path) -> list[str]:
    """The command of a load. Its result goes to a file: what is longer than a pipe holds came broken through one."""
    return [sys.executable, "-m", "benchmarks.gateway.load", json.dumps(dict(_fields(aim))), str(result)]


def _fields(aim: Aim) -> Iterator[tuple[str, object]]:
    for name in Aim.__slots__:
        yield name, getattr(aim, name)


class Contestant:
    """Where and how to ask, and what came of it."""

    def __init__(
        self,
        name: str,
        port: int,
        key: str,
        model: str,
        cpu: Callable[[], dict[str, float]] = dict,
        headers: dict[str, str] | None = None,
        cases: Sequence[tuple[bool, int]] = _CASES,
    ) -> None:
        self.name = name
        self._headers = headers or {}
        self._cpu = cpu
        self.cpu_ms: dict[tuple[bool, int], dict[str, float]] = {}
        """Of each of its processes, per request, in the last round."""
        self.port, self._key, self._model = port, key, model
        self.results: dict[tuple[bool, int], list[Result]] = {case: [] for case in cases}
        self.asked = 0

    def run(self, seconds: float, *, counts: bool = True) -> None:
        for case in self.results:
            streamed, connections = case
            before = self._cpu()
            aim = Aim(
                self.port,
                self._key,
                self._model,
                streamed,
                connections,
                seconds,
                events=CHUNKS,
                headers=self._headers,
            )
            result = measured(aim)
            self.asked += len(result.latency_ms)
            self.cpu_ms[case] = {
                process: round((seconds - before[process]) * 1000 / len(result.latency_ms), 2)
                for process, seconds in self._cpu().items()
            }
            if counts:
                self.results[case].append(result)

    def rps(self, streamed: bool, connections: int) -> float:
        return median(len(one.latency_ms) / one.wall_s for one in self.results[streamed, connections])

    def p50_ms(self, streamed: bool, connections: int = 1) -> float:
        return median(percentile(one.latency_ms, 0.5) for one in self.results[streamed, connections])

    def summary(self) -> dict[str, dict[str, Any]]:
        told: dict[str, dict[str, Any]] = {}
        for (streamed, connections), results in self.results.items():
            row = {
                "rps": self.rps(streamed, connections),
                "p50_ms": self.p50_ms(streamed, connections),
                "p99_ms": median(percentile(one.latency_ms, 0.99) for one in results),
                "first_p50_ms": median(percentile(one.first_ms, 0.5) for one in results),
            }
            told[f"{'streamed' if streamed else 'plain'}_{connections}"] = {
                name: round(value, 2) for name, value in row.items()
            } | {"cpu_ms": self.cpu_ms[streamed, connections]}
        return told

    def tell(self) -> None:
        for case, row in self.summary().items():
            print(
                f"  {self.name:10} {case:12} {row['rps']:8.1f} requests/s   P50 {row['p50_ms']:7.2f} ms   "
                f"P99 {row['p99_ms']:7.2f} ms   first byte P50 {row['first_p50_ms']:7.2f} ms   "
                f"CPU ms a request {row['cpu_ms'] or '-'}",
                flush=True,
            )


def held_streams(product: Product, port: int, streams: int, model_dir: Path) -> dict[str, float]:
    """Open at once, each with a token a second: what one more costs the gateway."""
    product.start_double(HELD, model_dir, HELD_STEP_S)
    try:
        # A first one, so that what is made once is not counted.
        measured(Aim(port, product.key, HELD, True, 1, 0.0, events=2, max_tokens=2))
        before_mb, before_s = product.memory_mb("gateway"), product.cpu_s("gateway")
        aim = Aim(port, product.key, HELD, True, streams, 0.0, events=10, max_tokens=10)
        with tempfile.TemporaryDirectory(prefix="weir-load-") as directory:
            written = Path(directory) / "result.json"
            with subprocess.Popen(_loading(aim, written), cwd=ROOT) as load:
                peak_mb = before_mb
                while load.poll() is None:
                    peak_mb = max(peak_mb, product.memory_mb("gateway"))
                    time.sleep(0.1)
            if load.returncode:
                return {"failed": load.returncode}  # the load has said why; the other figures stand
            result = Result(**json.loads(written.read_text()))
        tokens = aim.max_tokens * len(result.latency_ms)
        return {
            "streams": len(result.latency_ms),
            "kb_per_stream": round((peak_mb - before_mb) * 1000 / streams, 1),
            "gateway_cpu_us_per_token": round((product.cpu_s("gateway") - before_s) * 1e6 / tokens),
            "first_token_p99_ms": round(percentile(result.first_ms, 0.99), 1),
            "latency_p99_ms": round(percentile(result.latency_ms, 0.99), 1),
        }
    finally:
        product.stop(HELD)


@contextlib.contextmanager
def running_upstream() -> Iterator[int]:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway.upstream", str(port), str(CHUNKS)], cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 30
        while not answers(port):
            if time.monotonic() > deadline:
                sys.exit("the upstream did not start")
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def settled_rows(product: Product, asked: int) -> dict[str, float]:
    """Each request has its row; how long the last one took after the last answer."""
    began = time.monotonic()
    product.until(lambda: product.ledger_rows() >= asked, "the ledger")
    rows = product.ledger_rows()
    if rows != asked:
        sys.exit(f"{asked} requests, but {rows} rows in the ledger")
    return {"rows": rows, "drained_after_s": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--servers", default=",".join((*SERVERS, GRANIAN)), help="ours to measure")
    parser.add_argument("--production", default=UVICORN, help="the one that is compared")
    parser.add_argument("--streams", type=int, default=500, help="open at once; 0: skip that part")
    parser.add_argument(
        "--peers", default="litellm,portkey", help="installed below --peers-at where they are not yet"
    )
    parser.add_argument("--peers-at", type=Path, default=ROOT / "var" / "bench")
    arguments = parser.parse_args()
    servers = arguments.servers.split(",")
    model_dir = prepared()
    wanted = [name for name in arguments.peers.split(",") if name]
    programs = {name: _INSTALLED[name](arguments.peers_at.resolve() / name) for name in wanted}
    told: dict[str, object] = {}
    print(
        f"{processor()}, {arguments.rounds} round(s) of {arguments.seconds:g} s a load, {CHUNKS} tokens an answer"
    )
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench-")))
        upstream = Contestant("upstream", stack.enter_context(running_upstream()), "none", MODEL)
        peers: dict[str, Contestant] = {}
        if "litellm" in programs:
            port = stack.enter_context(litellm.running_litellm(programs["litellm"], upstream.port, scratch))
            peers["litellm"] = Contestant("litellm", port, litellm.KEY, litellm.MODEL)
        if "portkey" in programs:
            port = stack.enter_context(portkey.running_portkey(programs["portkey"], scratch))
            to = portkey.headers(upstream.port)
            plain = [case for case in _CASES if not case[0]]
            peers["portkey"] = Contestant("portkey", port, "none", MODEL, headers=to, cases=plain)
        product = stack.enter_context(running_product(scratch, model_dir, free_port()))
        ours = {name: Contestant(name, 0, product.key, MODEL, product.cpu_s_of_all) for name in servers}
        floor = Contestant("floor", 0, "none", MODEL, product.cpu_s_of_all)
        for round_ in range(arguments.rounds):
            for name, contestant in ours.items():
                # A fresh one each time: what one server leaves in memory is not the next one's.
                contestant.port = product.start_gateway(name)
                contestant.run(0.5, counts=False)
                contestant.run(arguments.seconds)
                if round_ == 0 and name == arguments.production and arguments.streams:
                    told["held"] = held_streams(product, contestant.port, arguments.streams, model_dir)
                product.stop("gateway")
            for peer in peers.values():
                if round_ == 0:
                    peer.run(0.5, counts=False)
                peer.run(arguments.seconds)
            upstream.run(min(1.0, arguments.seconds))
            floor.port = product.start_floor()
            floor.run(min(1.0, arguments.seconds))
            product.stop("floor")
        held = told.get("held")
        extra = 1 + arguments.streams if held else 0
        if not (isinstance(held, dict) and "failed" in held):
            told["ledger"] = settled_rows(product, sum(one.asked for one in ours.values()) + extra)
    for contestant in (*ours.values(), *peers.values(), floor, upstream):
        contestant.tell()
        told[contestant.name] = contestant.summary()
    for name in ("held", "ledger"):
        if name in told:
            print(f"  {name:10} {told[name]}")
    best = ours.get(arguments.production)
    if best and (other := peers.get("portkey")):
        told = {"portkey_plain_rps_ratio": round(best.rps(False, 32) / other.rps(False, 32), 2), **told}
    if best and (other := peers.get("litellm")):
        told = {
            "rps_ratio": round(min(best.rps(s, 32) / other.rps(s, 32) for s in (False, True)), 2),
            "added_p50_ratio": round(
                max(best.p50_ms(s) / (other.p50_ms(s) - upstream.p50_ms(s)) for s in (False, True)), 3
            ),
            **told,
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
