"""Who comes with hundreds of others is let in with few of them, and the loop turns in between."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from weir.turnstile import Turnstile

PER_TURN = 4


async def _crowd(turnstile: Turnstile | None, size: int) -> tuple[list[int], list[int]]:
    """Who got in, in order; and how many in each turn of the loop."""
    entered: list[int] = []
    turns: list[int] = [0]

    async def come(number: int) -> None:
        if turnstile is not None:
            await turnstile.passed()
        entered.append(number)
        turns[-1] += 1

    tasks = [asyncio.create_task(come(number)) for number in range(size)]
    while len(entered) < size:
        await asyncio.sleep(0)
        turns.append(0)
    await asyncio.gather(*tasks)
    return entered, turns


async def test_a_crowd_gets_in_by_turns_and_in_order():
    entered, turns = await _crowd(Turnstile(PER_TURN), 50)
    assert entered == list(range(50))
    assert max(turns) <= PER_TURN


async def test_who_cannot_wait_is_called_in_turn():
    turnstile = Turnstile(2)
    came: list[str] = []

    def let_in(name: str) -> bool:
        came.append(name)
        return name != "gone"

    assert all(turnstile.passes(partial(let_in, "at once")) for _ in range(2))
    for name in ("gone", "first", "second", "third"):
        assert not turnstile.passes(partial(let_in, name))
    assert came == []
    await asyncio.sleep(0)
    assert came == ["gone", "first", "second"]
    await asyncio.sleep(0)
    assert came[3:] == ["third"]


async def test_without_it_all_get_in_at_once():
    _, turns = await _crowd(None, 50)
    assert max(turns) == 50


async def test_few_do_not_wait():
    turnstile = Turnstile(PER_TURN)
    for _ in range(3):
        passing = turnstile.passed()
        with pytest.raises(StopIteration):  # done without a turn of the loop
            passing.send(None)
    await asyncio.sleep(0)


async def test_who_leaves_the_line_does_not_hold_it_up():
    turnstile = Turnstile(1)
    waiting = [asyncio.create_task(turnstile.passed()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in waiting[2:9]:
        task.cancel()
    done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert [isinstance(end, asyncio.CancelledError) for end in done] == [False] * 2 + [True] * 7 + [False]
    assert await asyncio.wait_for(turnstile.passed(), 10) is None
