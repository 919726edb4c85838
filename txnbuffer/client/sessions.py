"""The sessions of a client: one with each shard's service that it needs, opened when it does.

Most transactions begin at the shard that the client calls home; where that one is away for long, new ones begin
elsewhere. A named producer and a consumer group have the shard of their names, wherever their topics are. Each session
stays connected by itself, so a service that is away stops only what it has to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from snapshots.shards import shard_of
from txnbuffer.client.core import SessionCore
from txnbuffer.client.session import Session

AWAY = 2.0
"""Seconds without a connection after which transactions begin at another shard."""


class Sessions:
    """`home` is the session of shard `number` of `shards`; `make` makes that of another."""

    def __init__(
        self, home: Session, number: int = 0, shards: int = 1, make: Callable[[int], Session] | None = None
    ) -> None:
        self.shards = shards
        self._home = number
        self._make = make
        self._open = {number: home}

    def at(self, number: int) -> Session:
        """The session of a shard; of one that there isn't, home."""
        found = self._open.get(number)
        if found is None:
            if self._make is None or number >= self.shards:
                return self._open[self._home]
            found = self._open[number] = self._make(number)
        return found

    def of(self, name: str) -> Session:
        """The session of a named producer, or a consumer group."""
        return self.at(shard_of(name, self.shards) if self.shards > 1 else self._home)

    async def ready(self, name: str | None = None) -> Session:
        """A session by which a transaction can begin at once: that of a name, or any. Raises ServiceUnavailable."""
        while True:
            session = self.any() if name is None else self.of(name)
            session.check()
            if session.core.can_begin:
                return session
            with contextlib.suppress(TimeoutError):  # by then another shard may be the one
                async with asyncio.timeout(AWAY if name is None and self.shards > 1 else None):
                    await session.result(session.core.wait_to_begin)

    async def ask(self, name: str, put: Callable[[SessionCore, asyncio.Future[Any]], None]) -> Any:
        """What the service of a producer or a group answers to what `put` asks. Raises the error that is the answer."""
        session = self.of(name)
        return await session.result(lambda future: put(session.core, future))

    def any(self) -> Session:
        """The session for a transaction that can begin anywhere."""
        home = self._open[self._home]
        if self.shards == 1 or not home.away_for(AWAY):
            return home
        for session in self._open.values():
            if session.core.welcomed:
                return session
        others = [self.at((self._home + step) % self.shards) for step in range(1, self.shards)]
        return next((other for other in others if not other.away_for(AWAY)), home)

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(session.close() for session in self._open.values()))
