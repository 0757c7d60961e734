"""Loads the Lua beside this file: one verb, one file, each with `bucket.lua` in front."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from engine_worker.broker.connection import Caller

_LUA = Path(__file__).parent / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """One verb, called by its hash; a server that does not know it yet (new, restarted) gets the text."""

    text: str
    sha1: str

    async def __call__(self, client: Caller, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        try:
            return await client.evalsha(self.sha1, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.text, len(keys), *keys, *args)


@cache
def load(verb: str) -> Script:
    text = (_LUA / "bucket.lua").read_text() + (_LUA / f"{verb}.lua").read_text()
    return Script(text=text, sha1=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
