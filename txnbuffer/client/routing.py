"""Which topics of a cluster have partitions, and which of them a record goes to.

A record with a key goes where Pulsar's clients put that key. Records without one go to one partition after the other:
all that one call hands over together go to the same, so that they stay together in batches and record sets. Topics
may get more partitions while they are written to, and keys go to others from then on, as they do for Pulsar's clients.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Blobs
from broker_io.partitions import choose, partition_name
from broker_io.port import PartitionedBroker
from broker_io.position import Int64s
from txnbuffer.client.outbox import Rows
from txnbuffer.client.rows import pick
from txnbuffer.errors import Error, InvalidRequest

REFRESH = 10.0
"""Seconds after which it is asked again how many partitions a topic has."""


class Known:
    """What is known of a topic: `count` partitions, 0 for none; it is asked again at `until`. `turn`: for no key."""

    __slots__ = ("asking", "count", "turn", "until")

    def __init__(self) -> None:
        self.count = 0
        self.until = 0.0
        self.turn = random.randrange(2**16)  # noqa: S311  clients need not begin with the same partition
        self.asking: asyncio.Future[None] | None = None


class NoRoutes:
    """Where no topic has partitions."""

    async def parts(self, topic: str, rows: Rows, partition: int | None) -> Sequence[tuple[str, Rows]]:
        """Raises InvalidRequest for a `partition`."""
        _check_none(topic, partition)
        return ((topic, rows),)

    async def split(self, topic: str, records: Batch, partition: int | None) -> Sequence[tuple[str, Batch]]:
        """As `parts`, of columns."""
        _check_none(topic, partition)
        return ((topic, records),)


def _check_none(topic: str, partition: int | None) -> None:
    if partition is not None:
        raise InvalidRequest(f"topic {topic!r} has no partitions: it can't take a record for partition {partition}")


class Routes:
    """Belongs to one loop."""

    def __init__(self, broker: PartitionedBroker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Known] = {}

    async def parts(self, topic: str, rows: Rows, partition: int | None) -> Sequence[tuple[str, Rows]]:
        """The same rows by the topics to send them to: one that has no partitions, or partitions.

        Raises InvalidRequest for a `partition` that there is not, and what asking the cluster raises.
        """
        places = await self._places(topic, rows.keys, partition)
        return [(name, rows if which is None else pick(rows, which.tolist())) for name, which in places]

    async def split(self, topic: str, records: Batch, partition: int | None) -> Sequence[tuple[str, Batch]]:
        """As `parts`, of columns."""
        places = await self._places(topic, records.keys, partition)
        return [(name, records if which is None else records.take(which)) for name, which in places]

    async def _places(
        self, topic: str, keys: Sequence[bytes | None] | Blobs, partition: int | None
    ) -> Sequence[tuple[str, NDArray[np.intp] | None]]:
        """Topics to send to, each with the rows that go there; None: all of them."""
        known = self._known.get(topic)
        if known is None:
            known = await self._ask(topic)
        elif self._loop.time() > known.until:
            known.until = self._loop.time() + REFRESH
            self._ask_beside(topic, known)
        if partition is not None:
            return ((await self._named(topic, known, partition), None),)
        if not known.count:
            return ((topic, None),)
        known.turn += 1
        listed = keys.to_list() if isinstance(keys, Blobs) else keys
        chosen = _chosen(self._broker, listed, known.count, known.turn % known.count)
        if isinstance(chosen, int):
            return ((partition_name(topic, chosen), None),)
        numbers = np.unique(chosen).tolist()
        return [(partition_name(topic, number), np.flatnonzero(chosen == number)) for number in numbers]

    async def _named(self, topic: str, known: Known, partition: int) -> str:
        if type(partition) is not int or partition < 0:
            raise InvalidRequest(f"partitions are 0, 1, 2 …, not {partition!r}")
        if partition >= known.count:
            known = await self._ask(topic)
        if partition >= known.count:
            there = f"{known.count} partitions" if known.count else "no partitions"
            raise InvalidRequest(f"topic {topic!r} has {there}: it can't take a record for partition {partition}")
        return partition_name(topic, partition)

    async def _ask(self, topic: str) -> Known:
        count = await self._loop.run_in_executor(None, self._broker.partitions, topic)
        known = self._known.setdefault(topic, Known())
        known.count, known.until = count, self._loop.time() + REFRESH
        return known

    def _ask_beside(self, topic: str, known: Known) -> None:
        """Ask again while sends go on as before."""
        if known.asking is None or known.asking.done():
            known.asking = asyncio.ensure_future(self._ask_again(topic))

    async def _ask_again(self, topic: str) -> None:
        try:
            await self._ask(topic)
        except Error:  # the cluster is away: what was known holds until the next time
            return


def _chosen(broker: PartitionedBroker, keys: Sequence[bytes | None], count: int, turn: int) -> Int64s | int:
    """The partition of each row, or that of all."""
    if len(keys) == 1:
        return turn if keys[0] is None else int(choose([keys[0]], count, broker.hashing)[0])
    places = [place for place, key in enumerate(keys) if key is not None]
    if not places:
        return turn
    chosen = np.full(len(keys), turn, np.int64)
    chosen[places] = choose([key for key in keys if key is not None], count, broker.hashing)
    return chosen
