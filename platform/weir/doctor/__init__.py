"""What is wrong with this installation, and what to do about it: each check asks the real thing, within seconds."""

from __future__ import annotations

from collections.abc import Iterator

from weir.doctor import machine, servers, serving
from weir.doctor.finding import Finding, reporting

__all__ = ["Finding", "examine"]


def examine() -> Iterator[Finding]:
    """Every check in turn; one that finds its server away says so, and those that need that server too are left out."""
    database_answers = yield from reporting(servers.database)
    redis_answers = yield from reporting(servers.redis)
    if database_answers:
        if (yield from reporting(servers.migrations)):
            yield from machine.pepper()
        yield from servers.pooler()
        yield from servers.replica()
        yield from servers.row_security()
        yield from servers.database_clock()
    if redis_answers:
        yield from servers.redis_clock()
        yield from serving.engine()
        yield from serving.background()
    yield from serving.gateway()
    yield from machine.model()
    yield from machine.disk()
    yield from machine.settings_in_force()
