"""`python -m engine_worker.control WORKER load NAME=DIR` or `unload NAME`: what a worker process serves.

WORKER is its id, as the operator's live page and the log show it; REDIS_URL, or the file that
REDIS_URL_FILE names, says where the queue is. Workers obey that were started with --max-models above 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from engine_worker.arguments import redis_url
from engine_worker.broker import BrokerUnavailable, ControlBroker
from engine_worker.broker.commands import ModelAnswer


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_worker.control", description=__doc__)
    parser.add_argument("worker")
    parser.add_argument("action", choices=("load", "unload"))
    parser.add_argument("model", help="NAME=DIR to load, as --model takes it; NAME to unload")
    parser.add_argument(
        "--wait-s", type=float, default=600.0, help="for its answer; draining and loading take a while"
    )
    options = parser.parse_args(argv)
    name, _, source = options.model.partition("=")
    if not name or (options.action == "load") != bool(source):
        parser.error("give NAME=DIR to load, NAME to unload")
    url = redis_url(environ, parser, "beside `make run`: the console's live page does the same")
    try:
        answer = asyncio.run(_ask(url, options.worker, options.action, name, source, options.wait_s))
    except BrokerUnavailable as error:
        print(f"the queue can't be reached: {error}", file=sys.stderr)
        return 1
    if answer is None or answer.error:
        print(answer.error if answer else f"{options.worker} did not answer", file=sys.stderr)
        return 1
    print(f"{options.worker} serves: {', '.join(answer.models) or 'nothing'}")
    return 0


async def _ask(
    url: str, worker: str, action: str, name: str, source: str, wait_s: float
) -> ModelAnswer | None:
    broker = ControlBroker(url)
    try:
        return await broker.ask(worker, action, name, source, timeout_s=wait_s)
    finally:
        await broker.aclose()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
