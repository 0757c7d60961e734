"""A crowd at the door is let in a few at a time, so that the event loop goes on serving those inside.

Hundreds of requests that arrive in one moment would all be checked and tokenised in one turn of the loop: nothing is
read meanwhile, tokens stand still, and Redis's answers come too late for who waits for them. Here each turn begins a
few, in the order in which they came, and what the others do is done in between.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """`await turnstile.passed()` first of all; at once while few come. One per event loop."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._let_in = 0
        """In this turn of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def passed(self) -> None:
        if self._let_in < self._per_turn and not self._waiting:
            if self._let_in == 0:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._let_in += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < self._per_turn:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                self._let_in += 1
        if self._let_in:
            asyncio.get_running_loop().call_soon(self._next_turn)
