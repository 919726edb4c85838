"""Partitions: to which one a record is sent, and which ones a reader of a topic reads

A record with a key is sent to the partition that Pulsar's clients choose for this key. Records without a key are sent
to the partitions in turn; all those of one call to the same partition, so that they share batches and record sets. If a
topic gets more partitions, its keys are distributed over all of them from then on, as with Pulsar's clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Blobs
from broker_io.environment import current
from broker_io.errors import TopicNotFound
from broker_io.partitions import choose, partition_name, partition_of
from broker_io.port import Broker, PartitionedBroker
from broker_io.position import Int64s
from txnbuffer.checks import check_topics
from txnbuffer.client.send_columns import SendColumns, take_rows
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position

REFRESH = 10.0
"""Seconds after which the client asks for the number of partitions of a topic again."""


@dataclass(slots=True)
class TopicRoute:
    """`count` partitions of a topic, 0 for none, until the loop time `until`. `turn`: that of records without a key."""

    count: int = 0
    until: float = 0.0
    turn: int = field(default_factory=lambda: current().randomness.below(2**16))  # spreads clients over the partitions


class Routes:
    """The partitions of a cluster's topics. Use it on the loop that created it."""

    def __init__(self, broker: PartitionedBroker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, TopicRoute] = {}
        self._asking: dict[str, asyncio.Future[TopicRoute]] = {}

    async def parts(self, topic: str, rows: SendColumns, partition: int | None) -> Sequence[tuple[str, SendColumns]]:
        """Return the rows grouped by the topic or partition to send them to.

        Raises InvalidRequest for a `partition` that does not exist, and the errors of the cluster.
        """
        groups = await self._groups(topic, rows.keys, partition)
        return [(name, rows if which is None else take_rows(rows, which.tolist())) for name, which in groups]

    def known(self, topic: str, partition: int | None) -> bool:
        """Return whether `parts` need not wait: the cluster was asked about the topic, and it has the partition."""
        route = self._known.get(topic)
        return route is not None and (partition is None or (type(partition) is int and 0 <= partition < route.count))

    async def split(self, topic: str, records: Batch, partition: int | None) -> Sequence[tuple[str, Batch]]:
        """Return the records grouped by the topic or partition to send them to. Raises as `parts`."""
        groups = await self._groups(topic, records.keys, partition)
        return [(name, records if which is None else records.take(which)) for name, which in groups]

    async def _groups(
        self, topic: str, keys: Sequence[bytes | None] | Blobs, partition: int | None
    ) -> Sequence[tuple[str, NDArray[np.intp] | None]]:
        """Return the topics and partitions to send to, each with its row indexes; None: all rows."""
        known = self._known.get(topic)
        if known is None:
            known = await asyncio.shield(self._request(topic))
        elif self._loop.time() > known.until:
            known.until = self._loop.time() + REFRESH
            self._request(topic)  # if the cluster is unavailable, the known number is used until the next request
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

    async def _named(self, topic: str, known: TopicRoute, partition: int) -> str:
        if type(partition) is not int or partition < 0:
            raise InvalidRequest(f"partition must be 0, 1, 2 …, got {partition!r}")
        if partition >= known.count:
            known = await self._ask(topic)
        if partition >= known.count:
            there = f"{known.count} partitions" if known.count else "no partitions"
            raise InvalidRequest(f"topic {topic!r} has {there}: cannot send to partition {partition}")
        return partition_name(topic, partition)

    def _request(self, topic: str) -> asyncio.Future[TopicRoute]:
        """Ask for the number of partitions, once for all sends that wait for it: they continue in their order."""
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.ensure_future(self._ask(topic))
            asking.add_done_callback(partial(self._asked, topic))
        return asking

    def _asked(self, topic: str, asking: asyncio.Future[TopicRoute]) -> None:
        del self._asking[topic]
        if not asking.cancelled():
            asking.exception()  # the sends that waited raise it, if there still are any

    async def _ask(self, topic: str) -> TopicRoute:
        count = await asyncio.to_thread(self._broker.partitions, topic)
        known = self._known.setdefault(topic, TopicRoute())
        known.count, known.until = count, self._loop.time() + REFRESH
        return known


def _chosen(broker: PartitionedBroker, keys: Sequence[bytes | None], count: int, turn: int) -> Int64s | int:
    """Return the partition of each row, or a single partition for all rows."""
    if len(keys) == 1:
        return turn if keys[0] is None else int(choose([keys[0]], count, broker.hashing)[0])
    places = [place for place, key in enumerate(keys) if key is not None]
    if not places:
        return turn
    chosen = np.full(len(keys), turn, np.int64)
    chosen[places] = choose([key for key in keys if key is not None], count, broker.hashing)
    return chosen


Start: TypeAlias = "Position | datetime | str"
"""Where to start: a position, a time, "beginning" or "end"."""


class ReadTopics:
    """The topics and partitions that a reader reads. `partitioned`: the partitioned topics; they may get more.

    Raises InvalidRequest, TopicNotFound.
    """

    def __init__(self, broker: Broker, topics: str | Iterable[str], start: Start | Mapping[str, Start]) -> None:
        self._broker = broker
        self._start = start
        self._names = check_topics(topics)
        known = set(broker.topics())
        self.partitioned = [name for name in self._names if name not in known and _count(broker, name)]
        self._read = {name: name for name in self._names if name in known}
        self._marked: set[str] = set()
        for name in self._names:
            if name not in known and name not in self.partitioned:
                raise TopicNotFound(f"there is no topic {name!r} to read: create it, or correct the name")
        self._add(known)
        if isinstance(start, Mapping):
            unread = sorted(start.keys() - {*self._names, *self._read})
            parts = [(name, partition_of(name)) for name in unread]
            unknown = [name for name, part in parts if part is None or part.topic not in self.partitioned]
            if unknown:
                raise InvalidRequest(f"start has {', '.join(unknown)}, which this reader does not read")

    def first(self) -> list[tuple[str, Start]]:
        """Return all existing topics and partitions, each with its start."""
        self._marked = set(self._read)
        return [(name, self._start_of(name, topic)) for name, topic in self._read.items()]

    def parts(self) -> list[tuple[str, str]]:
        """Return all existing topics and partitions, each with the topic that it belongs to."""
        return list(self._read.items())

    def added(self) -> list[tuple[str, Start]]:
        """Return the partitions that were added and are not marked as read, each with its start."""
        self._add(set(self._broker.topics()))
        new = [(name, self._start_of(name, topic)) for name, topic in self._read.items() if name not in self._marked]
        return [(name, "beginning" if start == "end" else start) for name, start in new]

    def mark_read(self, name: str) -> None:
        """Mark a new partition as read."""
        self._marked.add(name)

    def _add(self, known: set[str]) -> None:
        for topic in self.partitioned:
            names = (partition_name(topic, number) for number in range(_count(self._broker, topic)))
            self._read |= {name: topic for name in names if name in known}

    def _start_of(self, name: str, topic: str) -> Start:
        if not isinstance(self._start, Mapping):
            found = self._start
        elif name in self._start:
            return self._start[name]
        else:
            found = self._start.get(topic, "beginning")
        if isinstance(found, Position) and name != topic:
            raise InvalidRequest(
                f"start {found} is a position in one partition of {topic!r}: give a start for each partition"
            )
        return found


def _count(broker: Broker, topic: str) -> int:
    return broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0
