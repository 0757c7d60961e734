"""LiteLLM's proxy in a virtual environment of its own: one virtual master key, no database, one worker process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gateway.peer import running
from benchmarks.gateway.product import free_port

VERSION = "1.108"
KEY = "sk-bench-0123456789"
MODEL = "bench"
_START_S = 180.0

_CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: "openai/{model}", api_base: "http://127.0.0.1:{upstream}/v1", api_key: "none"}}
general_settings: {{master_key: "{key}"}}
litellm_settings: {{telemetry: false}}
"""


def installed(venv: Path) -> Path:
    """Its command, after it was installed there, once."""
    command = venv / "bin" / "litellm"
    if not command.exists():
        print(f"installing LiteLLM {VERSION} into {venv} (some minutes, once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"litellm[proxy]=={VERSION}.*"], check=True)
    return command


@contextlib.contextmanager
def running_litellm(command: Path, upstream: int, scratch: Path) -> Iterator[int]:
    """The port of a proxy in front of the upstream."""
    port = free_port()
    config = scratch / "litellm.yaml"
    config.write_text(_CONFIG.format(model=MODEL, upstream=upstream, key=KEY))
    argv = [
        str(command),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--num_workers",
        "1",
    ]
    with running(
        "LiteLLM",
        argv,
        port=port,
        probe="/health/liveliness",
        scratch=scratch,
        start_s=_START_S,
        # No look at the network for prices.
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
    ):
        yield port
