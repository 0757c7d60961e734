"""A crowd at the door is let in a few at a time, so that the event loop goes on serving those inside.

Hundreds of requests that arrive in one moment would all be read, checked and tokenised in one turn of the loop: nothing
else is read meanwhile, tokens stand still, and Redis's answers come too late for who waits for them. Here each turn
begins a few, in the order in which they came, and what the others do is done in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turnstile:
    """One per event loop and door."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._let_in = 0
        """In this turn of the loop."""
        self._waiting: deque[Callable[[], bool]] = deque()

    async def passed(self) -> None:
        """Returns at once while few come."""
        if self._is_free():
            return
        turn = asyncio.get_running_loop().create_future()

        def let_in() -> bool:
            if turn.done():
                return False  # its client may have left
            turn.set_result(None)
            return True

        self._waiting.append(let_in)
        await turn

    def passes(self, let_in: Callable[[], bool]) -> bool:
        """The same for who can't wait: True, or `let_in` is called in its turn. It says whether there was somebody."""
        if self._is_free():
            return True
        self._waiting.append(let_in)
        return False

    def _is_free(self) -> bool:
        if self._let_in >= self._per_turn or self._waiting:
            return False
        if self._let_in == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._let_in += 1
        return True

    def _next_turn(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < self._per_turn:
            self._let_in += self._waiting.popleft()()
        if self._let_in:
            asyncio.get_running_loop().call_soon(self._next_turn)
