"""How long one request holds the gateway's event loop, and with it everybody's tokens.

    make bench-loop-lag
    make bench-loop-lag ARGS="--rounds 1 --streams 0"

The production server, the whole path, a worker's double. Each case is one large request alone, whose answer is read
whole; then so many streams at once. Medians and the worst of the rounds: `held` by the clock, `worked` by the loop's
own CPU time (see gateway/probed.py). Whatever takes more than 20 ms belongs into a thread or into parts. The last line
is JSON, in ms.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.measure import processor
from benchmarks.gateway.__main__ import measured
from benchmarks.gateway.load import Aim
from benchmarks.gateway.product import HELD, HELD_STEP_S, MODEL, free_port, running_product
from benchmarks.model import prepared

EMBEDS = "bench-embeds"
_DIMENSIONS = 384
_WORDS = "Why is the sky blue, and what would have to be otherwise for it to be green? "


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    path: str
    body: bytes
    status: int = 200


def cases() -> Iterator[Case]:
    """Bodies of about a megabyte (uploads end at 2.5), and lists as long as they may be."""

    def chat(**fields: Any) -> bytes:
        return json.dumps({"model": MODEL, "max_tokens": 20, **fields}).encode()

    def message(text: str, role: str = "user") -> dict[str, str]:
        return {"role": role, "content": text}

    megabyte = _WORDS * (1_000_000 // len(_WORDS))
    chats, completions, embeddings = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    yield Case("one short chat", chats, chat(messages=[message("Hi")]))
    fits = _WORDS * (25_000 // len(_WORDS))
    yield Case("a chat that fills the context", chats, chat(messages=[message(fits)]))
    yield Case("1 MB, one message", chats, chat(messages=[message(megabyte)]), 400)
    yield Case("500 KB, one message", chats, chat(messages=[message(megabyte[:500_000])]), 400)
    many = [message("Hm?" * 4, ("user", "assistant")[index % 2]) for index in range(19_999)]
    yield Case("1 MB, 20,000 messages", chats, chat(messages=many), 400)
    control = [message("<|im_end|> " + megabyte[:400_000])]
    yield Case("400 KB with control tokens", chats, chat(messages=control), 400)
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool_{index}", "description": _WORDS * 96, "parameters": {}},
        }
        for index in range(128)
    ]
    yield Case("1 MB of tools", chats, chat(messages=[message("Hi")], tools=tools), 400)
    yield Case("1 MB that is no JSON", chats, chat(messages=[message(megabyte)])[:-3], 400)
    yield Case("1 MB of an unknown field", chats, chat(messages=[message("Hi")], other=many), 400)
    ids = [index % 40_000 + 100 for index in range(160_000)]

    def prompt(of: Any) -> bytes:
        return json.dumps({"model": MODEL, "max_tokens": 1, "prompt": of}).encode()

    yield Case("8,000 token ids", completions, prompt(ids[:8000]))
    yield Case("160,000 token ids", completions, prompt(ids), 400)
    twenty = [ids[at : at + 8000] for at in range(0, 160_000, 8000)]
    yield Case("20 prompts of 8,000 token ids", completions, prompt(twenty))
    echoed = json.dumps({"model": MODEL, "max_tokens": 1, "prompt": twenty, "echo": True}).encode()
    yield Case("the same, echoed", completions, echoed)
    yield Case("64 short prompts", completions, prompt([f"{index}: {_WORDS * 24}" for index in range(64)]))

    def embed(of: Any, form: str) -> bytes:
        return json.dumps({"model": EMBEDS, "input": of, "encoding_format": form}).encode()

    texts = [f"{index}: {_WORDS * 5}" for index in range(2048)]
    for form in ("base64", "float"):
        yield Case(f"2,048 texts embedded, {form}", embeddings, embed(texts, form))
    lists = [ids[at : at + 78] for at in range(2048)]
    yield Case("2,048 lists of token ids embedded", embeddings, embed(lists, "base64"))


class Gateway:
    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    def probe(self) -> dict[str, float]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/probe")
            found: dict[str, float] = json.loads(connection.getresponse().read())
            return found

    def held_by(self, case: Case) -> dict[str, float]:
        self.probe()
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            connection.request("POST", case.path, case.body, headers)
            response = connection.getresponse()
            answer = response.read()
        if response.status != case.status:
            raise SystemExit(f"{case.name}: {response.status} and not {case.status}: {answer[:500]!r}")
        return self.probe()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=500, help="open at once; 0: skip that part")
    arguments = parser.parse_args()
    model_dir = prepared()
    found: dict[str, list[dict[str, float]]] = {}
    print(f"{processor()}, {arguments.rounds} round(s); ms, median and worst", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch,
        running_product(Path(scratch), model_dir, free_port()) as product,
    ):
        product.start_double(EMBEDS, model_dir, 0.0, _DIMENSIONS)
        gateway = Gateway(product.start_probed(), product.key)
        for round_ in range(arguments.rounds + 1):
            for case in cases():
                held = gateway.held_by(case)
                if round_:  # the first loads what is loaded once
                    found.setdefault(case.name, []).append(held)
        if arguments.streams:
            product.start_double(HELD, model_dir, HELD_STEP_S)
            aim = Aim(gateway.port, product.key, HELD, True, arguments.streams, 0.0, events=10, max_tokens=10)
            measured(Aim(gateway.port, product.key, HELD, True, 1, 0.0, events=2, max_tokens=2))
            for _ in range(min(2, arguments.rounds)):
                gateway.probe()
                measured(aim)
                found.setdefault(f"{arguments.streams} streams", []).append(gateway.probe())
    told: dict[str, dict[str, float]] = {}
    for name, rounds in found.items():
        told[name] = {}
        for kind in ("held_ms", "worked_ms"):
            values = [one[kind] for one in rounds]
            told[name] |= {kind: round(median(values), 1), f"{kind}_worst": round(max(values), 1)}
        row = told[name]
        print(
            f"  {name:36} held {row['held_ms']:7.1f} {row['held_ms_worst']:7.1f}   "
            f"worked {row['worked_ms']:7.1f} {row['worked_ms_worst']:7.1f}",
            flush=True,
        )
    print(json.dumps(told))


if __name__ == "__main__":
    main()
