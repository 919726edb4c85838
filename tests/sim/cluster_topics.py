"""What a simulated Pulsar cluster stores of a topic: ledgers of entries, cursors, policies and the compacted view.

It behaves as a managed ledger of Pulsar 4.0 does:

- A topic that is loaded gets a new ledger; an empty one is replaced, and the numbers are those of the whole cluster.
- A closed ledger is dropped once all cursors have passed it, unless retention keeps it. Readers have no durable cursor.
- Compaction keeps the newest message of each key at its position. It drops messages without a key, and deletes unless
  they were stored alone and uncompressed. A dropped message of a batch leaves a placeholder.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import _pulsar

from broker_io.pulsar.reader import BATCH_SIZE
from broker_io.varint import encode_varint

if TYPE_CHECKING:
    from sim.cluster_client import SimProducer, SimReader

COMPACTION = "__compaction"
DEDUPLICATION = "pulsar.dedup"


class Place(NamedTuple):
    """Where an entry is."""

    ledger: int
    entry: int

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}"


NOWHERE = Place(-1, -1)


class Received:
    """A message as a reader of the client library gets it."""

    __slots__ = ("_batch", "_message", "_place", "_published", "_size")

    def __init__(self, message: Any | None, place: Place, batch: int, size: int, published: int) -> None:
        self._message = message
        self._place = place
        self._batch = batch
        self._size = size
        self._published = published

    @property
    def place(self) -> tuple[int, int, int]:
        return (*self._place, self._batch)

    def message_id(self) -> Any:
        bare = _pulsar.MessageId(-1, *self._place, self._batch)
        if self._batch < 0:
            return bare
        return _pulsar.MessageId.deserialize(bare.serialize() + BATCH_SIZE + encode_varint(self._size))

    def publish_timestamp(self) -> int:
        return self._published

    def data(self) -> bytes:
        return b"" if self._message is None else self._message.data()

    def length(self) -> int:
        return 0 if self._message is None else self._message.length()

    def partition_key(self) -> str:
        return "" if self._message is None else self._message.partition_key()

    def properties(self) -> dict[str, str]:
        return {} if self._message is None else self._message.properties()

    def has_null_value(self) -> bool:
        return self._message is not None and self._message.has_null_value()

    def event_timestamp(self) -> int:
        return 0 if self._message is None else self._message.event_timestamp()

    def int_schema_version(self) -> int:
        return -1

    def topic_name(self) -> str:
        return ""

    @property
    def deletes(self) -> bool:
        """Whether compaction takes it for a delete of its key."""
        return not self.length()

    def emptied(self) -> Received:
        """The placeholder that compaction leaves of it."""
        return Received(None, self._place, self._batch, self._size, self._published)


@dataclass(slots=True)
class Entry:
    """One entry of a ledger: one message, or those of a batch."""

    place: Place
    messages: list[Received]
    batched: bool
    compressed: bool
    published: int
    size: int

    @property
    def last(self) -> tuple[int, int, int]:
        """The position of its last message."""
        return self.messages[-1].place


@dataclass(slots=True)
class StoredLedger:
    """`unreadable`: no bookie that has it answers."""

    number: int
    entries: list[Entry] = field(default_factory=list)
    size: int = 0
    closed: bool = False
    unreadable: bool = False

    @property
    def end(self) -> Place:
        return Place(self.number, len(self.entries) - 1)


class StoredTopic:
    """One incarnation of a topic, with the producers and readers that are attached to it."""

    def __init__(self, name: str, created: float, new_ledger: Callable[[], int], ledger_entries: int) -> None:
        self.name = name
        self.created = created
        self.properties: dict[str, str] = {}
        self.policies: dict[str, Any] = {}
        self.cursors: dict[str, Place] = {}
        self.sequences: dict[str, int] = {}
        """The last sequence id of each producer, if the topic deduplicates."""
        self.deleted = False
        self.epoch = 0
        """The number of exclusive producers that it has had."""
        self.producers: dict[SimProducer, None] = {}
        self.readers: dict[SimReader, None] = {}
        self.ledgers = [StoredLedger(new_ledger())]
        self.last = Place(self.ledgers[0].number, -1)
        self.compacted: list[Entry] = []
        self.horizon = NOWHERE
        self.compaction = "NOT_RUN"
        self.loads = 0
        self._new_ledger = new_ledger
        self._ledger_entries = ledger_entries

    @property
    def owner(self) -> SimProducer | None:
        """The exclusive producer that is attached."""
        return next((producer for producer in self.producers if producer.exclusive), None)

    @property
    def deduplicates(self) -> bool:
        return bool(self.policies.get("deduplicationEnabled"))

    # Writing

    def append(self, messages: list[Any], now_ms: int, *, batched: bool, compressed: bool) -> Entry:
        """Store an entry."""
        newest = self.ledgers[-1]
        if len(newest.entries) >= self._ledger_entries:
            newest = self.roll()
        place = Place(newest.number, len(newest.entries))
        received = [
            Received(message, place, index if batched else -1, len(messages), now_ms)
            for index, message in enumerate(messages)
        ]
        size = sum(map(size_of, messages))
        entry = Entry(place, received, batched, compressed, now_ms, size)
        newest.entries.append(entry)
        newest.size += size
        self.last = place
        for reader in [*self.readers]:
            reader.pump()
        return entry

    # Ledgers and cursors

    def load(self) -> None:
        """A broker loads the topic: it closes the newest ledger, or replaces it if it is empty."""
        self.loads += 1
        newest = self.ledgers[-1]
        newest.closed = True
        if not newest.entries:
            self.ledgers.pop()
        self.ledgers.append(StoredLedger(self._new_ledger()))
        if len(self.ledgers) == 1:
            self.last = Place(self.ledgers[0].number, -1)
        self.compaction = "NOT_RUN"
        self.trim()

    def roll(self) -> StoredLedger:
        """Close the newest ledger, because it is full or a bookie of it failed, and continue in another one."""
        if self.ledgers[-1].entries:
            self.ledgers[-1].closed = True
            self.ledgers.append(StoredLedger(self._new_ledger()))
            self.trim()
        return self.ledgers[-1]

    @property
    def readable(self) -> bool:
        return not any(ledger.unreadable for ledger in self.ledgers)

    def trim(self) -> None:
        """Drop the closed ledgers that all cursors have passed, unless retention keeps them."""
        if not self.policies.get("retained"):
            needed = min(self.cursors.values(), default=self.last)
            while len(self.ledgers) > 1 and self.ledgers[0].end <= needed:
                self.ledgers.pop(0)

    def truncate(self) -> None:
        """Drop all closed ledgers, whatever needs them; cursors and readers move to the end."""
        self.cursors = dict.fromkeys(self.cursors, self.last)
        del self.ledgers[:-1]
        for reader in [*self.readers]:
            reader.skip_to(self.last)

    def drop(self, number: int) -> None:
        """Lose one ledger: it is in the metadata no longer."""
        self.ledgers = [ledger for ledger in self.ledgers if ledger.number != number]

    def subscribe(self, name: str) -> None:
        """Create a cursor before the first message."""
        self.cursors[name] = Place(self.ledgers[0].number, -1)

    def reset_cursor(self, name: str, place: Place) -> None:
        """Move a cursor, so that `place` is what it reads next."""
        before = [ledger.end for ledger in self.ledgers if ledger.number < place.ledger and ledger.entries]
        inside = Place(place.ledger, place.entry - 1)
        self.cursors[name] = inside if place.entry > 0 or not before else before[-1]

    # Reading

    def entries_after(self, place: Place, *, compacted: bool = False) -> Iterator[Entry]:
        """The entries after a place; none of a ledger that cannot be read, nor of those after it."""
        if compacted and place < self.horizon:
            yield from self.compacted[bisect.bisect_right(self.compacted, place, key=lambda entry: entry.place) :]
            place = self.horizon
        first = bisect.bisect_left(self.ledgers, place.ledger, key=lambda ledger: ledger.number)
        for ledger in self.ledgers[first:]:
            if ledger.unreadable:
                return
            yield from ledger.entries[max(place.entry + 1, 0) if ledger.number == place.ledger else 0 :]

    def find(self, place: Place) -> Entry | None:
        """The entry at a place, if it still exists."""
        for ledger in self.ledgers:
            if ledger.number == place.ledger and 0 <= place.entry < len(ledger.entries):
                return ledger.entries[place.entry]
        return None

    def last_message(self, *, compacted: bool = False) -> tuple[int, int, int]:
        """The position of the last message that a reader can get; before all others if there is none."""
        last = NOWHERE
        if not compacted or self.last > self.horizon:
            last = self.last
        elif self.compacted:
            return self.compacted[-1].last
        found = self.find(last)
        return (-1, -1, -1) if found is None else found.last

    # Compaction

    def compact(self) -> None:
        """Keep the newest message of each key up to the end."""
        entries = [*self.entries_after(NOWHERE, compacted=True)]
        newest = {
            message.partition_key(): message.place
            for entry in entries
            for message in entry.messages
            if message.partition_key()
        }
        kept: list[Entry] = []
        for entry in entries:
            stays = [
                newest.get(message.partition_key()) == message.place
                and not (message.deletes and (entry.batched or entry.compressed))
                for message in entry.messages
            ]
            if any(stays):
                messages = [
                    message if stay else message.emptied() for message, stay in zip(entry.messages, stays, strict=True)
                ]
                kept.append(Entry(entry.place, messages, entry.batched, entry.compressed, entry.published, entry.size))
        self.compacted = kept
        self.horizon = self.cursors[COMPACTION] = self.last
        self.trim()

    def statistics(self) -> dict[str, Any]:
        """What the REST interface answers to `internalStats`."""
        newest = self.ledgers[-1]
        rows = [
            {"ledgerId": ledger.number, "entries": len(ledger.entries), "size": ledger.size} for ledger in self.ledgers
        ]
        rows[-1].update(entries=0, size=0)
        return {
            "currentLedgerEntries": len(newest.entries),
            "currentLedgerSize": newest.size,
            "lastConfirmedEntry": str(self.last),
            "state": "LedgerOpened",
            "ledgers": rows,
            "cursors": {name: {"markDeletePosition": str(place)} for name, place in self.cursors.items()},
        }


def size_of(message: Any) -> int:
    """The bytes of a message in an entry, about: its value, its key and its properties."""
    labels = sum(len(name) + len(text) + 4 for name, text in message.properties().items())
    return int(message.length()) + len(message.partition_key()) + labels + 16
