"""All that is stored is read once after a start: a topic whose log is damaged stops before anybody builds on it."""

from __future__ import annotations

import asyncio

from broker_io.errors import Error, TopicNotFound
from broker_io.port import VerifyingBroker
from snapshots.errors import TopicDamaged
from snapshots.keys import is_internal
from txnbuffer.service.topics import Topics

PAUSE = 1.0
"""Seconds until what could not be read for now is read again."""


class Verifying:
    """`damages`: what was found, by topic; those of data topics are what stopped them, too. `done`: all was read."""

    def __init__(self, topics: Topics) -> None:
        self.damages: dict[str, TopicDamaged] = {
            name: problem for name, problem in topics.keeper.problems.items() if isinstance(problem, TopicDamaged)
        }
        self.done = False
        self._topics = topics

    async def run(self) -> None:
        """Look at every ledger of every topic, beside all else, where the broker has the log itself."""
        broker = self._topics.broker
        if isinstance(broker, VerifyingBroker):
            for name in broker.topics():
                if name not in self.damages:
                    await self._check(broker, name)
        self.done = True

    async def _check(self, broker: VerifyingBroker, name: str) -> None:
        try:
            await self._read(broker, name)
        except TopicNotFound:
            pass  # deleted meanwhile
        except Error as error:
            await self._found(name, error)

    async def _read(self, broker: VerifyingBroker, name: str) -> None:
        for ledger in await asyncio.to_thread(self._topics.broker.ledgers, name):
            while True:
                try:
                    await asyncio.to_thread(broker.check_stored, name, ledger.ledger)
                    break
                except Error as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(PAUSE)

    async def _found(self, name: str, error: Error) -> None:
        damage = self.damages[name] = TopicDamaged(name, error, needed=is_internal(name))
        if not is_internal(name):
            async with self._topics.keeping:
                self._topics.damaged(name, damage)
