"""Bytes that may be under way at once; who wants more waits until some are given back."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """For one event loop. What is larger than all of it is let in alone."""

    def __init__(self, total: int) -> None:
        self.used = 0
        self._total = total
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, size: int) -> None:
        while self.used and self.used + size > self._total:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self.used += size

    def give(self, size: int) -> None:
        self.used -= size
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
