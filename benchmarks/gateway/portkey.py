"""Portkey's gateway, from npm, in a folder of its own: a proxy on Node without any keys or limits."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gateway.peer import running
from benchmarks.gateway.product import free_port

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
    argv = [_found("node"), str(program), f"--port={port}", "--headless"]
    with running(
        "Portkey",
        argv,
        port=port,
        probe="/",
        scratch=scratch,
        start_s=_START_S,
        env={"NODE_ENV": "production"},
    ):
        yield port
