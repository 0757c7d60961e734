"""`python -m tests.weir.talkative_server PORT`: the product's Daphne, less patient, with that application."""

from __future__ import annotations

import sys

from weir.daphne_server import BoundedServer, CommandLine

BoundedServer.stall_s = 2.0

if __name__ == "__main__":
    CommandLine().run(
        ["-v", "0", "-b", "127.0.0.1", "-p", sys.argv[1], "tests.weir.talkative_app:application"]
    )
