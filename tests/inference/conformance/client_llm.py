"""`llm`, configured for an OpenAI-compatible server as its documentation says."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

home = Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: weir\n  model_name: {os.environ['WEIR_MODEL']}\n"
    f"  api_base: {os.environ['WEIR_URL']}/v1\n  api_key_name: weir\n"
)


def llm(*arguments: str) -> str:
    env = os.environ | {"LLM_USER_PATH": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip()


llm("keys", "set", "weir", "--value", os.environ["WEIR_KEY"])
ask = ("-m", "weir", "hello", "-s", "Be brief.", "-o", "max_tokens", "7", "-o", "seed", "3")
streamed = llm(*ask)
assert len(streamed) == 7, streamed
assert llm(*ask, "--no-stream") == streamed
print("ok")
