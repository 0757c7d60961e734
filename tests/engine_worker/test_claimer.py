"""When a worker tells Redis anew how much room it has: what it is handed meanwhile costs no call of its own."""

from __future__ import annotations

import asyncio

from engine_worker.broker import Claim
from tests.engine_worker.broker.driving import put, until
from tests.engine_worker.running_worker import Running, finished
from tests.engine_worker.scripted_engine import ScriptedEngine


class Narrowing(ScriptedEngine):
    """What it is given turns out so large that each takes the room of twenty."""

    def room(self) -> int:
        return max(0, self.max_num_seqs - 20 * len(self.active))


def claims_of(running: Running) -> list[int]:
    """Of each claim from now on that is made because something was handed over, the room that it told of."""
    told: list[int] = []
    claim = running.broker.claim

    async def counted(count: int, **given: int | bool) -> list[Claim]:
        task = asyncio.current_task()
        if task is not None and task.get_name() == "worker-take":
            told.append(count)
        return await claim(count, **given)  # type: ignore[arg-type]  # a test's mix

    running.broker.claim = counted  # type: ignore[method-assign]
    return told


async def has_offered(running: Running) -> None:
    async def check() -> bool:
        return running.worker._claimer._offered > 0

    await until(check)


async def test_who_has_much_room_is_handed_many_without_a_claim(start, gateway, make, model, monkeypatch):
    monkeypatch.setattr("engine_worker.claimer._WAIT_FOR_WORK_S", 4.0)
    monkeypatch.setattr("engine_worker.broker.worker.OFFER_MS", 60_000)
    running = start(ScriptedEngine(max_num_seqs=100))
    await has_offered(running)
    told = claims_of(running)
    for n in range(40):
        await put(gateway, make(f"r{n}"))
    await until(finished(gateway, model, *(f"r{n}" for n in range(40))))
    assert told == []
    n = 40
    while not told:  # before all that it offered is gone
        await put(gateway, make(f"r{n}"))
        await until(finished(gateway, model, f"r{n}"))
        n += 1
    assert told[0] >= 90


async def test_who_has_less_room_than_it_offered_says_so(start, gateway, make, model, monkeypatch):
    monkeypatch.setattr("engine_worker.claimer._WAIT_FOR_WORK_S", 4.0)
    monkeypatch.setattr("engine_worker.broker.worker.OFFER_MS", 60_000)
    engine = Narrowing(max_num_seqs=100)
    running = start(engine)
    await has_offered(running)
    told = claims_of(running)
    engine.pause()
    await put(gateway, make("large"))

    async def has_told() -> bool:
        return told == [80]

    await until(has_told)
    engine.resume()
    await until(finished(gateway, model, "large"))
