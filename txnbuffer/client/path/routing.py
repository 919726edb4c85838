"""Partitions: to which one a record is sent

A record with a key is sent to the partition that Pulsar's clients choose for this key. Records without a key are sent
to the partitions in turn; all those of one call to the same partition, so that they share batches and record sets. If a
topic gets more partitions, its keys are distributed over all of them from then on, as with Pulsar's clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Blobs
from broker_io.environment import current
from broker_io.partitions import choose, partition_name
from broker_io.port import PartitionedBroker
from broker_io.position import Int64s
from txnbuffer.client.lifecycle import retrieve_error
from txnbuffer.errors import InvalidRequest

REFRESH = 10.0
"""Seconds after which the client asks for the number of partitions of a topic again."""


Groups: TypeAlias = "Sequence[tuple[str, NDArray[np.intp] | None]]"
"""Topics or partitions, each with the row indexes of its records; None: all rows."""


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

    def known(self, topic: str, partition: int | None) -> bool:
        """Return whether `groups` need not wait: the cluster was asked about the topic, and it has the partition."""
        route = self._known.get(topic)
        return route is not None and (partition is None or (type(partition) is int and 0 <= partition < route.count))

    async def groups(self, topic: str, keys: Sequence[bytes | None] | Blobs, partition: int | None) -> Groups:
        """Return the topics and partitions to send records with these keys to.

        Raises InvalidRequest for a `partition` that does not exist, and the errors of the cluster.
        """
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
        retrieve_error(asking)

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
