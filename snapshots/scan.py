"""The scan of the snapshot topic: the newest entry of each key, topic by topic.

A scan decides nothing but which writers count. Whether the entries of a topic fit together is checked when it is
restored, topic by topic, so that a bad topic stops no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from broker_io.batch import PlacedBatch, PropertyColumn
from broker_io.compacted import CompactedReader
from broker_io.port import Broker, Resource
from broker_io.position import EARLIEST, Position
from snapshots.format import (
    CHAINS,
    END,
    EPOCH_PROPERTY,
    KIND_PROPERTY,
    OVERFLOW,
    OWNER_KEY,
    SNAPSHOT_TOPIC,
    VERSION_PROPERTY,
    EntryKey,
    Stored,
)

EPOCH_DIGITS = 18

HISTORY_KEPT = 8


@dataclass(slots=True)
class TopicEntries:
    """The newest live entries of one data topic: the end entry, others by kind and number.

    `end_deleted`: the end entry was deleted.
    """

    end: Stored | None = None
    end_deleted: bool = False
    numbered: dict[str, dict[int, Stored]] = field(default_factory=lambda: {kind: {} for kind in (*CHAINS, OVERFLOW)})

    def put(self, key: EntryKey, stored: Stored) -> None:
        if key.kind == END:
            self.end = None if stored.value is None else stored
            self.end_deleted = stored.value is None
        elif stored.value is None:
            self.numbered[key.kind].pop(key.number, None)
        else:
            self.numbered[key.kind][key.number] = stored

    def get(self, key: EntryKey) -> Stored | None:
        return self.end if key.kind == END else self.numbered[key.kind].get(key.number)

    def keys(self, topic: str) -> list[EntryKey]:
        """The keys of all numbered entries."""
        return [EntryKey(topic, kind, number) for kind, found in self.numbered.items() for number in sorted(found)]

    def as_of_end(self) -> TopicEntries:
        """A copy, which later entries do not change."""
        return TopicEntries(self.end, numbered={kind: {**found} for kind, found in self.numbered.items()})

    def __bool__(self) -> bool:
        return self.end is not None or any(self.numbered.values())


@dataclass(slots=True)
class SnapshotTable:
    """All entries up to `position`, of the data topics in `only`, which may become fewer, or of all.

    `epoch` is the highest of an `owner` entry, `zombies` the number of ignored entries of fenced owners, `foreign` the
    keys that are not entry keys. `history` is optional: the last HISTORY_KEPT ends of each topic, each with the entries
    that were live when it was written, oldest first.
    """

    only: Set[str] | None = None
    topics: dict[str, TopicEntries] = field(default_factory=dict)
    position: Position = EARLIEST
    epoch: int = 0
    owners: list[tuple[Position, int]] = field(default_factory=list)
    zombies: int = 0
    foreign: set[bytes] = field(default_factory=set)
    history: dict[str, deque[TopicEntries]] | None = None

    def feed(self, placed: PlacedBatch) -> None:
        """Apply messages after `position`; those up to it are known already."""
        batch = placed.messages
        keys = batch.keys.to_list()
        absent = batch.values.absent_mask().tolist()
        columns = [
            _texts(batch.properties.get(name), len(keys)) for name in (VERSION_PROPERTY, KIND_PROPERTY, EPOCH_PROPERTY)
        ]
        for row, (position, key, version, kind, epoch) in enumerate(zip(placed.positions, keys, *columns, strict=True)):
            if key is None or position <= self.position:
                continue
            stored = Stored(position, version, kind, _epoch(epoch), None)
            parsed = EntryKey.parse(key)
            if key == OWNER_KEY:
                self.owners.append((position, stored.epoch))
                self.epoch = max(self.epoch, stored.epoch)
            elif stored.epoch < self.epoch and stored.epoch >= 0:
                self.zombies += 1
            elif parsed is None:
                self.foreign.add(key)
            elif self.only is None or parsed.topic in self.only:
                value = None if absent[row] else batch.values[row]
                self._put(parsed, stored._replace(value=value))
        if len(placed):
            self.position = max(self.position, placed.positions.last)

    def _put(self, key: EntryKey, stored: Stored) -> None:
        entries = self.topics.setdefault(key.topic, TopicEntries())
        entries.put(key, stored)
        if self.history is not None and key.kind == END and stored.value is not None:
            ends = self.history.setdefault(key.topic, deque(maxlen=HISTORY_KEPT))
            ends.append(entries.as_of_end())


def _epoch(text: str) -> int:
    """The epoch in a text, -1 if it is invalid: any program may have written it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= EPOCH_DIGITS else -1


def _texts(column: PropertyColumn | None, count: int) -> list[str]:
    return [""] * count if column is None else [text or "" for text in column.to_list()]


class Scan(Resource):
    """A reader of the snapshot topic and the table that it fills.

    The reader opens before an end is requested, so that a compaction meanwhile can't hide an entry both from the part
    that was read and from the part after that end.
    """

    def __init__(
        self, broker: Broker, topic: str = SNAPSHOT_TOPIC, only: Set[str] | None = None, *, raw: bool = False
    ) -> None:
        self._broker = broker
        self._reader = CompactedReader(broker, topic, compacted=not raw)
        self.table = SnapshotTable(only, history={} if raw else None)

    def read_to_end(self) -> None:
        """Read to the current end. Raises ServiceUnavailable if messages before it do not come."""
        for placed in self._reader.read_to_end(self._broker.last_position(self._reader.topic)):
            self.table.feed(placed)

    def read_to(self, position: Position) -> None:
        """Read up to a message that this process has just written. Raises ServiceUnavailable if it does not come."""
        for placed in self._reader.read_to(position):
            self.table.feed(placed)

    def close(self) -> None:
        self._reader.close()


def scan(broker: Broker, topic: str = SNAPSHOT_TOPIC, only: str | None = None, *, raw: bool = False) -> SnapshotTable:
    """Scan the snapshot topic up to its current end, for one data topic or all.

    `raw` includes the history that is still in the raw log.

    Raises TopicNotFound, and ServiceUnavailable if messages before the end do not come.
    """
    with Scan(broker, topic, None if only is None else frozenset({only}), raw=raw) as running:
        running.read_to_end()
        return running.table
