"""A topic as a new owner finds it: restored from its snapshot, its log applied up to the end. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker
from snapshots.errors import SnapshotMissing
from snapshots.table import SnapshotTable, TopicEntries
from txnbuffer.buffer.effects import Effect
from txnbuffer.recovery.recovery import Restored, restore
from txnbuffer.recovery.tailing import Tail

T = TypeVar("T")


class Each(Protocol):
    """Does something for each of many topics, in order as `map` does, or at the same time; the results in order."""

    def __call__(self, function: Callable[[str], T], topics: Iterable[str], /) -> Iterable[T]: ...


class Replayed(NamedTuple):
    """`effects`: what was replayed. `notes` tell what was unusual."""

    tail: Tail
    effects: list[Effect]
    notes: list[str]


class Gone(NamedTuple):
    """The topic is gone, or another one now, or its deletion was cut short."""

    why: Error


def replayed(
    broker: Broker,
    table: SnapshotTable,
    snapshot_topic: str,
    new_tail: Callable[[Restored, TopicEntries], Tail],
    topic: str,
) -> Replayed | Gone | Error:
    """What became of a topic with entries. An error stops this topic, and is returned: the others go on."""
    try:
        restored = restore(broker, table, topic, snapshot_topic=snapshot_topic)
    except (SnapshotMissing, TopicNotFound) as error:
        return Gone(error)
    except Error as error:
        return error
    try:
        tail = new_tail(restored, table.topics[topic])
    except Error as error:
        return error
    try:
        return Replayed(tail, tail.replay(), restored.notes)
    except Error as error:
        tail.close()
        return error
