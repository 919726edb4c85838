"""What a reader is asked for: topics, of which those with partitions are all their partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TypeAlias

from broker_io.errors import TopicNotFound
from broker_io.partitions import partition_name, partition_of
from broker_io.port import Broker, PartitionedBroker
from txnbuffer.checks import check_topics
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position

Start: TypeAlias = "Position | datetime | str"
"""Where to begin: a position, a time, "beginning" or "end"."""


class ReadTopics:
    """`partitioned`: topics with partitions, of which more may come. Raises InvalidRequest, TopicNotFound."""

    def __init__(self, broker: Broker, topics: str | Iterable[str], start: Start | Mapping[str, Start]) -> None:
        self._broker = broker
        self._start = start
        self._names = check_topics(topics)
        known = set(broker.topics())
        self.partitioned = [name for name in self._names if name not in known and _count(broker, name)]
        self._read = {name: name for name in self._names if name in known}
        self._taken: set[str] = set()
        for name in self._names:
            if name not in known and name not in self.partitioned:
                raise TopicNotFound(f"there is no topic {name!r} to read")
        self._add(known)
        if isinstance(start, Mapping):
            unread = sorted(start.keys() - {*self._names, *self._read})
            strange = [name for name in unread if not _is_of(name, self.partitioned)]
            if strange:
                raise InvalidRequest(f"a start is given for {', '.join(strange)}, which is not read")

    def first(self) -> list[tuple[str, Start]]:
        """Each topic and partition that there is, and where to begin with it."""
        self._taken = set(self._read)
        return [(name, self._start_of(name, topic)) for name, topic in self._read.items()]

    def parts(self) -> list[tuple[str, str]]:
        """Each topic and partition that there is, and the topic that it is of."""
        return list(self._read.items())

    def came(self) -> list[tuple[str, Start]]:
        """The partitions that were not `taken` yet, and where to begin with them: they came since."""
        self._add(set(self._broker.topics()))
        new = [(name, self._start_of(name, topic)) for name, topic in self._read.items() if name not in self._taken]
        return [(name, "beginning" if start == "end" else start) for name, start in new]

    def taken(self, name: str) -> None:
        """A partition that came is read."""
        self._taken.add(name)

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
            raise InvalidRequest(f"{found} is a position in one partition of {topic!r}: give a start for each of them")
        return found


def _is_of(name: str, topics: Iterable[str]) -> bool:
    partition = partition_of(name)
    return partition is not None and partition.topic in topics


def _count(broker: Broker, topic: str) -> int:
    return broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0
