"""`python -m tests.weir.talkative_server SERVER PORT`: the product's Daphne or uvicorn, less patient, with that
application."""

from __future__ import annotations

import json
import sys
from typing import Any

from weir.daphne_server import BoundedServer, CommandLine, ImpatientChannel
from weir.servers import DAPHNE
from weir.slow_clients import SLOW_BODIES, Answer
from weir.uvicorn_server import ImpatientHttp, ImpatientWebSocket, serve

APPLICATION = "tests.weir.talkative_app:application"


def answer(scope: dict[str, Any]) -> Answer:
    told = {"method": scope["method"], "path": scope["path"], "query": scope["query_string"].decode()}
    return Answer(408, [("X-Said", dict(scope["headers"])[b"x-name"].decode())], json.dumps(told).encode())


if __name__ == "__main__":
    server, port = sys.argv[1:]
    SLOW_BODIES.answer = answer
    if server == DAPHNE:
        BoundedServer.stall_s = 2.0
        ImpatientChannel.headers_s = ImpatientChannel.body_s = 5.0
        CommandLine().run(["-v", "0", "-b", "127.0.0.1", "-p", port, APPLICATION])
    else:
        ImpatientHttp.stall_s = ImpatientWebSocket.stall_s = 2.0
        ImpatientHttp.headers_s = ImpatientHttp.body_s = 5.0
        serve(APPLICATION, host="127.0.0.1", port=int(port))
