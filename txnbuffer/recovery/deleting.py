"""What tells a snapshot that was deleted on purpose from one that was lost.

As long as the data topic is there, a deletion leaves its end entry behind, `deleted` and without parts:
the log still holds transactions, and only that entry says why no snapshot tells of them. It goes with the
first recovery that finds the data topic gone or made anew, and a registration replaces it.
"""

from __future__ import annotations

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from snapshots.entries import EndEntry, decode_end
from snapshots.errors import SnapshotError
from snapshots.table import TopicEntries


def deleted_whole(broker: Broker, topic: str, entries: TopicEntries) -> bool:
    """Whether nothing of a deletion is left to be done: its end entry is of the topic that is there, and alone."""
    end = _end(topic, entries)
    if end is None or not end.deleted or entries.parts or entries.spills:
        return False
    return exists(broker, topic, end.incarnation)


def incarnation_written(topic: str, entries: TopicEntries) -> str:
    """The incarnation that the end entry is of; empty if that can't be told."""
    end = _end(topic, entries)
    return "" if end is None else end.incarnation


def exists(broker: Broker, topic: str, incarnation: str) -> bool:
    """Whether this very topic is there."""
    try:
        return broker.incarnation(topic) == incarnation
    except TopicNotFound:
        return False


def _end(topic: str, entries: TopicEntries) -> EndEntry | None:
    if entries.end is None:
        return None
    try:
        return decode_end(topic, entries.end)
    except SnapshotError:
        return None
