"""Portkey's gateway, from npm, in a folder of its own: a proxy on Node without any keys or limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gateway.product import answers, free_port

VERSION = "1.15.2"
_START_S = 60.0


def installed(folder: Path) -> Path:
    """Its program, after it was installed there, once. Node and npm must be there."""
    program = folder / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    if not program.exists():
        print(f"installing Portkey's gateway {VERSION} into {folder}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
        subprocess.run(
            [_found("npm"), "install", *quiet, f"@portkey-ai/gateway@{VERSION}"], cwd=folder, check=True
        )
    return program


def _found(command: str) -> str:
    return shutil.which(command) or sys.exit(
        f"no {command} here: install Node, or leave portkey out of --peers"
    )


def headers(upstream: int) -> dict[str, str]:
    """By which a request says where it is to go."""
    return {"x-portkey-provider": "openai", "x-portkey-custom-host": f"http://127.0.0.1:{upstream}/v1"}


@contextlib.contextmanager
def running_portkey(program: Path, scratch: Path) -> Iterator[int]:
    port = free_port()
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with (scratch / "portkey.log").open("wb") as log:
        proxy = subprocess.Popen(
            [_found("node"), str(program), f"--port={port}", "--headless"],
            env=inherited | {"NODE_ENV": "production"},
            cwd=scratch,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not answers(port, "/"):
            if proxy.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"Portkey did not start:\n{(scratch / 'portkey.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield port
    finally:
        proxy.terminate()
        try:
            proxy.wait(15)
        except subprocess.TimeoutExpired:
            proxy.kill()
            proxy.wait(10)
