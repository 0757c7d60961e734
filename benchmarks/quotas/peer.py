"""LiteLLM's proxy with the same kinds of limits, in a virtual environment of its own.

Its keys come from a `custom_auth` function, which gives them their limits without a database, as LiteLLM's own would
have them; its counters are in Redis, shared by its processes. The model is LiteLLM's own mock: nothing is behind it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.quotas.edge import percentiles_ms
from benchmarks.quotas.product import ROOT, children, free_port, wait_for
from weir import embedded

HOME: Final = Path(os.environ.get("WEIR_LITELLM_VENV", ROOT / "var" / "peers" / "litellm"))
_START_S: Final = 600.0
_AUTH: Final = """
from litellm.proxy._types import UserAPIKeyAuth

async def authenticate(request, api_key):
    # KIND-AMOUNT-NAME: the limit is in the key.
    kind, amount, name = api_key.removeprefix("Bearer ").removeprefix("sk-").split("-", 2)
    limits = {} if kind == "none" else {f"{kind}_limit": int(amount)}
    return UserAPIKeyAuth(api_key=f"sk-{kind}-{amount}-{name}", **limits)
"""
_CONFIG: Final = """
model_list:
  - model_name: mock
    litellm_params: {{model: openai/mock, api_key: none, mock_response: "an answer of some words, always the same"}}
litellm_settings:
  telemetry: false
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {port}, supported_call_types: []}}
general_settings:
  custom_auth: bench_auth.authenticate
"""


def is_installed() -> bool:
    return (HOME / "bin" / "litellm").exists()


def version() -> str:
    ask = [str(HOME / "bin" / "pip"), "show", "litellm"]
    shown = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    return next(line.split()[-1] for line in shown.splitlines() if line.startswith("Version"))


@contextmanager
def proxies(scratch: Path, count: int) -> Iterator[list[str]]:
    valkey = embedded.prepare_valkey(scratch / "peer", durable=False).command.argv[0]
    port, log = free_port(), scratch / "litellm.log"
    (scratch / "bench_auth.py").write_text(_AUTH)
    (scratch / "config.yaml").write_text(_CONFIG.format(port=port))
    keep = ("PATH", "HOME", "LANG", "TMPDIR")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    # It refuses to start without one, though the keys are custom_auth's.
    env["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(32)}"
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": str(scratch)}
    with children(log) as running, log.open("ab") as output:

        def start(*argv: str) -> None:
            running.append(subprocess.Popen(argv, cwd=scratch, env=env, stdout=output, stderr=output))

        start(valkey, "--port", str(port), "--bind", "127.0.0.1", "--save", "")
        urls = []
        for _ in range(count):
            listen = str(free_port())
            litellm = (str(HOME / "bin" / "litellm"), "--config", "config.yaml")
            start(*litellm, "--host", "127.0.0.1", "--port", listen)
            urls.append(f"http://127.0.0.1:{listen}")
            wait_for(f"{urls[-1]}/health/liveliness", _START_S, running[-1])
        yield urls


async def _ask(http: httpx.AsyncClient, url: str, key: str) -> tuple[int, dict[str, Any], float]:
    body = {"model": "mock", "messages": [{"role": "user", "content": "p" * 60}], "max_tokens": 100}
    began = time.perf_counter()
    answer = await http.post(
        f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    took = time.perf_counter() - began
    return answer.status_code, answer.json(), took


async def measure(
    urls: Sequence[str], *, clients: int, requests: int, tokens: int, alone: int
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        for url in urls:  # everybody's first request loads something
            await _ask(http, url, "sk-none-0-warm")
        failed = 0

        async def burst(key: str, each: int) -> tuple[int, int, list[float], float]:
            """Answers, their tokens, the seconds of each refusal, and of all."""
            admitted = used = 0
            refused: list[float] = []

            async def client(number: int) -> None:
                nonlocal admitted, used, failed
                for turn in range(each):
                    try:
                        status, answer, took = await _ask(http, urls[(number + turn) % len(urls)], key)
                    except httpx.TransportError:  # under this many it drops some
                        failed += 1
                        continue
                    if status == 200:
                        admitted += 1
                        used += answer["usage"]["total_tokens"]
                    else:
                        assert status == 429, answer
                        refused.append(took)

            began = time.perf_counter()
            await asyncio.gather(*(client(number) for number in range(clients)))
            return admitted, used, refused, time.perf_counter() - began

        # Its window is a minute: all that is asked here is asked in one.
        each = 1 + 2 * requests // clients
        admitted, _, _, took_s = await burst(f"sk-rpm-{requests}-{time.time_ns()}", each)
        await asyncio.sleep(1)
        _, used, _, _ = await burst(f"sk-tpm-{tokens}-{time.time_ns()}", each)
        spent = f"sk-rpm-1-{time.time_ns()}"
        await _ask(http, urls[0], spent)
        _, _, refused, refusing_s = await burst(spent, each)
        timed: dict[str, list[float]] = {"none": [], "rpm": []}
        for number in range(alone * 2):
            kind = ("none", "rpm")[number % 2]
            timed[kind].append((await _ask(http, urls[0], f"sk-{kind}-1000000-alone"))[2])
    without, with_limit = percentiles_ms(timed["none"]), percentiles_ms(timed["rpm"])
    return {
        "version": version(),
        "overshoot": {
            "requests": max(0, admitted - requests),
            "tokens": max(0, used - tokens),
        },
        "dropped_connections": failed,
        "granted": {"requests": requests, "tokens": tokens},
        "used": {"requests": admitted, "tokens": used},
        "decisions_per_s": round(each * clients / took_s, 1),
        "refusals_per_s": round(len(refused) / refusing_s, 1),
        "added_p50_ms": round(with_limit[0] - without[0], 3),
        "added_p99_ms": round(with_limit[1] - without[1], 3),
    }
