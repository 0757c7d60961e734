"""Clients that would be too heavy for the product's own environment, each as its registry ships it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.site import ROOT, Site

HERE = Path(__file__).resolve().parent
CACHE = ROOT / ".venv-conformance"


@pytest.fixture(scope="session")
def python_with_clients() -> str:
    """An interpreter that has what requirements.txt pins; made at first use, kept until the pins change."""
    pins = HERE / "requirements.txt"
    python = CACHE / "bin" / "python"

    def make() -> None:
        _run(sys.executable, "-m", "venv", "--clear", str(CACHE))
        _run(
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-compile",
            "--requirement",
            str(pins),
        )

    _once(CACHE / "pins", [pins], make)
    return str(python)


@pytest.fixture(scope="session")
def node_packages() -> Path:
    """A folder with the `node_modules` that package-lock.json pins."""
    if shutil.which("npm") is None:
        pytest.skip("there is no Node here: the openai npm package is not tried")
    folder = ROOT / ".venv-conformance-node"
    locks = [HERE / "package.json", HERE / "package-lock.json"]

    def make() -> None:
        for lock in locks:
            shutil.copy(lock, folder)
        _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)

    _once(folder / "pins", locks, make)
    return folder


@pytest.fixture
def runs_against(site: Site, key: str, model: str, request: pytest.FixtureRequest) -> Callable[..., str]:
    def run(*command: str, tools: bool = False, **more: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
            "WEIR_URL": site.url,
            "WEIR_KEY": key,
            "WEIR_MODEL": model,
            # None of them may ask anything of the internet.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false",
        }
        if tools:
            env["WEIR_TOOL_MODEL"] = request.getfixturevalue("engine_model")
        return _run(*command, env=env | more, cwd=HERE)

    return run


def _once(stamp: Path, pins: list[Path], make: Callable[[], None]) -> None:
    wanted = hashlib.sha256(b"".join(pin.read_bytes() for pin in pins)).hexdigest()
    stamp.parent.mkdir(exist_ok=True)
    with (ROOT / ".venv-conformance.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        make()
        stamp.write_text(wanted)


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
