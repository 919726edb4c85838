"""Where readers start, and the topics and partitions that they read

A place to start is one of

    "beginning"   the oldest record that the log still has; "earliest" means the same
    "end"         the next record that is written; "latest" means the same
    Position      the record at this position, or the next one
    Seqno(n)      the record with this number, or the next one
    datetime      the first record published at or after this time; local time if it has no time zone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.partitions import partition_name, partition_of
from broker_io.port import Broker, PartitionedBroker
from broker_io.position import Int64s
from txnbuffer.checks import check_flag, check_position
from txnbuffer.client.topic_names import check_topics
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position


@dataclass(frozen=True, slots=True)
class Seqno:
    """The number of a visible record of a topic, from 1; where a reader starts. Raises InvalidRequest."""

    number: int

    def __post_init__(self) -> None:
        if type(self.number) is not int or not 1 <= self.number < 2**63:
            raise InvalidRequest(f"a seqno is an integer from 1 to 2^63 - 1, got {self.number!r:.80}")

    def __str__(self) -> str:
        return f"seqno {self.number}"


Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
"""What readers return: the records of committed transactions only, or also those of open and aborted ones."""
Start: TypeAlias = Position | Seqno | datetime | Literal["beginning", "earliest", "end", "latest"]
"""Where to start: a position, a seqno, a time, "beginning" or "end"."""
Until: TypeAlias = Position | Seqno | datetime | Literal["now"]
"""Where to end: a position, a seqno, a time, or what is visible now; see `txnbuffer.client.reading.ends`."""

WORDS: Mapping[str, Literal["beginning", "end"]] = {
    "beginning": "beginning",
    "earliest": "beginning",
    "end": "end",
    "latest": "end",
}
"""The word that this package uses for each."""


def canonical(start: Start) -> Start:
    """Return the start with the word that this package uses. Raises InvalidRequest for any other value."""
    if isinstance(start, str):
        if start in WORDS:
            return WORDS[start]
    elif isinstance(start, Position):
        return check_position(start, "start")
    elif isinstance(start, (Seqno, datetime)):
        return start
    raise InvalidRequest(f"start must be 'beginning', 'end', a Position, a Seqno or a datetime, got {start!r:.80}")


def canonical_until(until: Until) -> Until:
    """Return the end. Raises InvalidRequest for another value."""
    if isinstance(until, Position):
        return check_position(until, "until")
    if isinstance(until, (Seqno, datetime)) or (isinstance(until, str) and until == "now"):
        return until
    raise InvalidRequest(f"until must be 'now', a Position, a Seqno or a datetime, got {until!r:.80}")


class StartPoint(NamedTuple):
    """The first record to read: at or after `position`, and `seqno`, published at or after `not_before` (ms)."""

    position: Position
    not_before: int = 0
    seqno: int = 0

    @property
    def before(self) -> Position:
        """The position just before the start."""
        start = self.position
        return start if start == EARLIEST else Position(start.ledger, start.entry - 1)

    def first_of(self, records: PlacedBatch, seqnos: Int64s | None = None) -> int:
        """Return the row of the first record to read, or the number of rows if there is none."""
        first = records.positions.search(self.position)
        if self.seqno and seqnos is not None:
            first = max(first, int(np.searchsorted(seqnos, self.seqno)))
        if self.not_before:
            rows = np.flatnonzero(records.publish_times[first:] >= self.not_before)
            first = first + int(rows[0]) if len(rows) else len(records)
        return first


def start_point(broker: Broker, topic: str, start: Start) -> StartPoint:
    """Return the first record to read for the argument `start`. Raises InvalidRequest, PositionTrimmed."""
    start = canonical(start)
    if isinstance(start, Position):
        if EARLIEST < start < Position(first := broker.ledgers(topic)[0].ledger, 0):
            raise PositionTrimmed(
                f"topic {topic} begins at ledger {first}: position {start} was trimmed; start at the beginning"
            )
        return StartPoint(start)
    if isinstance(start, Seqno):
        return StartPoint(EARLIEST, seqno=start.number)
    if start == "beginning":
        return StartPoint(EARLIEST)
    last = broker.last_position(topic)
    end = EARLIEST if last is None else Position(last.ledger, last.entry + 1)
    if not isinstance(start, datetime):
        return StartPoint(end)
    time = milliseconds(start, "start")
    found = broker.position_at(topic, time)
    return StartPoint(end, time) if found is None else StartPoint(found)


def milliseconds(time: datetime, what: str) -> int:
    """Return milliseconds since 1970. Raises InvalidRequest, which names the argument."""
    try:
        return max(round(time.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"{what} is out of range: {time}") from None


class ReadTopics:
    """The topics and partitions that a reader reads.

    `partitioned`: the partitioned topics; they may get more. `missing`: the topics to `wait` for, which do not exist.
    `start`: where to start on those that come later. With `until` no partitions are added, and until "now" no topics.
    Raises InvalidRequest, TopicNotFound.
    """

    def __init__(
        self,
        broker: Broker,
        topics: str | Iterable[str],
        start: Start | Mapping[str, Start],
        until: Until | Mapping[str, Until] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        self._broker = broker
        self.start = start
        self._until = until
        self.names = self.missing = check_topics(topics)
        self.partitioned: list[str] = []
        self._read: dict[str, str] = {}
        self._find()
        if self.missing and not check_flag(wait, "wait"):
            raise TopicNotFound(
                f"there is no topic {self.missing[0]!r} to read: create it, correct the name, or ask for the right to "
                "read it; with wait=True, readers and groups wait for it"
            )
        for what, places in (("start", start), ("until", until)):
            if isinstance(places, Mapping):
                self._check_names(what, places)
        if until is not None:
            self.missing = [name for name in self.missing if self._until_of(name, name) != "now"]

    def _check_names(self, what: str, places: Mapping[str, object]) -> None:
        unread = sorted(places.keys() - {*self.names, *self._read})
        parts = [(name, partition_of(name)) for name in unread]
        expected = {*self.partitioned, *self.missing}
        unknown = [name for name, part in parts if part is None or part.topic not in expected]
        if unknown:
            raise InvalidRequest(f"{what} has {', '.join(unknown)}, which this reader does not read")

    def first(self) -> list[tuple[str, Start]]:
        """Return all existing topics and partitions, each with its start."""
        return [(name, self._start_of(name, topic)) for name, topic in self._read.items()]

    def parts(self) -> list[tuple[str, str]]:
        """Return all existing topics and partitions, each with the topic that it belongs to."""
        return list(self._read.items())

    def added(self, read: set[str]) -> list[tuple[str, Start]]:
        """Return the topics and partitions that were added, other than those in `read`, each with its start."""
        self._find(partitions=self._until is None)
        new = [(name, self._start_of(name, topic)) for name, topic in self._read.items() if name not in read]
        return [(name, "beginning" if start == "end" else start) for name, start in new]

    def moved(self, start: Start | Mapping[str, Start]) -> list[tuple[str, Start]]:
        """Return the topics and partitions that another start moves, each with it: of a mapping only those in it.

        Raises as a new object.
        """
        new = ReadTopics(self._broker, self.names, start, wait=True)
        starts = zip(new.first(), new.parts(), strict=True)
        return [
            (name, place)
            for (name, place), (_, topic) in starts
            if not isinstance(start, Mapping) or name in start or topic in start
            if self._until is None or name in self._read
        ]

    @property
    def may_grow(self) -> bool:
        """Whether `added` can return anything."""
        return bool(self.missing) or (self._until is None and bool(self.partitioned))

    def until_of(self, name: str) -> Until | None:
        """Return where a topic or partition ends. Raises InvalidRequest."""
        return None if self._until is None else self._until_of(name, self._read[name])

    def _find(self, *, partitions: bool = True) -> None:
        """Look for missing topics, and for new partitions of the others."""
        known = set(self._broker.topics())
        names, self.missing = self.missing, []
        before = len(self.partitioned)
        for name in names:
            if name in known:
                self._read[name] = name
            elif _count(self._broker, name):
                self.partitioned.append(name)
            else:
                self.missing.append(name)
        for topic in self.partitioned[0 if partitions else before :]:
            parts = (partition_name(topic, number) for number in range(_count(self._broker, topic)))
            self._read |= {name: topic for name in parts if name in known}

    def _start_of(self, name: str, topic: str) -> Start:
        return canonical(_place("start", self.start, name, topic, "beginning"))

    def _until_of(self, name: str, topic: str) -> Until:
        return canonical_until(_place("until", self._until, name, topic, "now"))


def _place(what: str, places: Any, name: str, topic: str, default: str) -> Any:
    """Return where to start or to end on a topic or partition: for all, or by its name or that of its topic."""
    if isinstance(places, Mapping):
        if name in places:
            return places[name]
        places = places.get(topic, default)
    if isinstance(places, Position | Seqno) and name != topic:
        raise InvalidRequest(f"{what} {places} is in one partition of {topic!r}: give a {what} for each partition")
    return places


def _count(broker: Broker, topic: str) -> int:
    return broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0
