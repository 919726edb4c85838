"""Looks whether policies endanger topics that are open: what drops records in silence is told before it does."""

from __future__ import annotations

import asyncio

from broker_io.errors import Error, TopicNotFound, UnsafePolicy
from broker_io.port import GuardedBroker
from snapshots.keys import SNAPSHOT_TOPIC
from txnbuffer.coordinator.entries import TOPIC as DECISIONS
from txnbuffer.coordinator.letters import TOPIC as LETTERS
from txnbuffer.service.topics import Topics


class Guarding:
    """`dangers`: what endangers each topic now, as of the last look; looks come every `seconds`."""

    def __init__(self, topics: Topics, seconds: float) -> None:
        self.dangers: dict[str, Error] = {}
        self._topics = topics
        self._seconds = seconds

    async def run(self) -> None:
        """Look at all topics now and then, for ever, where the broker has such policies."""
        broker = self._topics.broker
        while isinstance(broker, GuardedBroker):
            await asyncio.sleep(self._seconds)
            shard = self._topics.shard
            ours = (DECISIONS, SNAPSHOT_TOPIC, LETTERS) if shard.of > 1 else (DECISIONS, SNAPSHOT_TOPIC)
            names = [*map(shard.topic, ours), *self._topics.by_name]
            self.dangers = {name: danger for name, danger in self.dangers.items() if name in names}
            for name in names:
                await self._check(broker, name)

    async def _check(self, broker: GuardedBroker, name: str) -> None:
        try:
            await asyncio.to_thread(broker.check_topic, name)
        except UnsafePolicy as error:
            self.dangers[name] = error
        except TopicNotFound:
            self.dangers.pop(name, None)
        except Error:
            pass  # it could not be seen this time: what was found last stands
        else:
            self.dangers.pop(name, None)
