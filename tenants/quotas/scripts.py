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

    async def __call__(self, client: Caller, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        try:
            return await client.evalsha(self.sha1, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.text, len(keys), *keys, *args)


@cache
def load(verb: str) -> Script:
    return _script(_source("bucket") + _source(verb))


@cache
def load_reserve_then(follow: str) -> Script:
    """`reserve` with another script's text behind: see then.lua."""
    parts = (("reserve", _source("bucket") + _source("reserve")), ("follow", follow))
    functions = "".join(f"local function {name}(KEYS, ARGV)\n{text}\nend\n" for name, text in parts)
    return _script(functions + _source("then"))


def _source(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text()


def _script(text: str) -> Script:
    return Script(text=text, sha1=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
