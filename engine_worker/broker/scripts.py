"""Loads the Lua beside this file: one verb, one file; a line `--@include NAME` pulls in a fragment."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

from engine_worker.broker.connection import Caller

_LUA = Path(__file__).parent / "lua"
_INCLUDE = re.compile(r"^--@include (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One verb. Calls by hash; a server that does not know it yet (new, restarted, failed over) gets the text."""

    text: str
    sha1: str

    async def __call__(self, client: Caller, prefix: str, args: Sequence[str | bytes | int]) -> Any:
        try:
            return await client.evalsha(self.sha1, 1, prefix, *args)
        except NoScriptError:
            return await client.eval(self.text, 1, prefix, *args)

    def call_sync(self, client: Redis, prefix: str, args: Sequence[str | bytes | int]) -> Any:
        try:
            return client.evalsha(self.sha1, 1, prefix, *args)
        except NoScriptError:
            return client.eval(self.text, 1, prefix, *args)


def _source(name: str) -> str:
    return _INCLUDE.sub(lambda match: _source(match[1]), (_LUA / f"{name}.lua").read_text())


@cache
def load(verb: str) -> Script:
    text = _COMMENT.sub("", _source(verb))
    return Script(text=text, sha1=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
