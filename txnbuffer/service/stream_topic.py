"""One streamed topic: its mutation manager, fed with what gets seqnos, and where in the log a seqno is to be found.

A topic has a feed from its first stream on until a while after its last one. What was numbered before comes from
the log.

Durable cursors of a service: kept in the snapshots of their topics, asked for by name, in retention's way.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.errors import Error
from broker_io.port import Ledger
from broker_io.position import NO_INDEX, Int64s, Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.sequencer import Sequenced
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.errors import MutationsTrimmed, SeqnoGap, StreamTrimmed, TooManyCursors, UnknownCursor
from txnbuffer.mutations import MemoryBudget, MutationBatch, MutationManager, ReadLog, SnapshotIndex
from txnbuffer.mutations.memory import MIN_SNAPSHOT_BYTES, SNAPSHOTS_PER_TOPIC
from txnbuffer.recordset import expand, pieces
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.restore import before_ledger
from txnbuffer.service.snapshot_scheduler import SnapshotScheduler
from txnbuffer.service.topic import Topics
from txnbuffer.streams.server import TopicInfo, acknowledged, check_cursor_name, first_needed
from txnbuffer.streams.token import ResumeToken

RESERVED = "tb."
INDEX_ENTRIES = 1024
BACKFILL_BYTES = 16 * 1024 * 1024


class SeqnoAnchor(NamedTuple):
    """The first visible record at `position`, or behind it if not `inclusive`, has the number `seqno`."""

    seqno: int
    position: Position
    inclusive: bool


class Feed:
    """`attach`, then `begin`. `news` is called, in whatever thread, when there is something to `take`.

    `problem`: why nothing more can be streamed. `idle_since`: when its last stream ended, None while it has one.
    """

    manager: MutationManager

    def __init__(self, name: str, followed: FollowedTopic, news: Callable[[], None], now: float) -> None:
        self.name = name
        self.followed = followed
        self.problem: Error | None = None
        self.idle_since: float | None = now
        self._budget: MemoryBudget
        self._news = news
        self._lock = threading.Lock()
        self._came: list[MutationBatch] = []
        self._reached: dict[str, SeqnoAnchor] = {}

    def attach(self) -> int:
        """Take from now on what is numbered; the last number before. Called while nothing is numbered."""
        self.followed.sequencing.on_sequenced = self._numbered
        return self.followed.sequencing.sequencer.next_seqno - 1

    def begin(self, high: int, budget: MemoryBudget) -> None:
        """Manage the mutations behind `high`, within a budget."""
        self.manager = MutationManager(
            high,
            index=SnapshotIndex.of(self.followed.index, INDEX_ENTRIES),
            max_snapshot_bytes=budget.snapshot_bytes,
            backfill_bytes=max(min(BACKFILL_BYTES, 2 * budget.budget // SNAPSHOTS_PER_TOPIC), 2 * MIN_SNAPSHOT_BYTES),
            account=budget.account,
        )
        self._budget = budget
        budget.add(self.name, self.manager)

    def _numbered(self, placed: PlacedBatch, numbered: Sequenced) -> None:
        """Messages got seqnos; whichever thread works on the tail calls."""
        start, stop, counts, first = numbered
        if self.problem is not None or not counts.any():
            return
        try:
            rows = placed if (start, stop) == (0, len(placed)) else placed.take(slice(start, stop))
            mutations = [*mutations_in(rows, counts, first, self.followed.buffer)]
        except Error as error:  # the numbers stand all the same, and the topic's transactions go on
            self.problem = error
        else:
            with self._lock:
                self._came += mutations
        self._news()

    def take(self) -> bool:
        """Queue what has come; whether there was anything."""
        with self._lock:
            came, self._came = self._came, []
        for mutations in came:
            self.manager.queue_many(mutations)
        return bool(came)

    def persist(self) -> None:
        """Have the index of mutation snapshots go into the next snapshot of the buffer."""
        self.manager.trim(self.oldest(self.followed.buffer.first_ledger))
        if self.manager.persist():
            self.followed.index = self.manager.index.columns()

    def oldest(self, first_ledger: int) -> int:
        """The seqno of the first mutation that there still is if the log begins with a ledger."""
        return oldest_seqno(self.followed, first_ledger)

    def close(self) -> None:
        """Feed nobody any more; its cursors are closed."""
        self.followed.sequencing.on_sequenced = None
        self.take()
        self.persist()
        self._budget.remove(self.name)

    # For reads of the log

    def place(self, request: ReadLog) -> SeqnoAnchor:
        """Where to begin to read so that as little as may be is read in vain. Raises MutationsTrimmed."""
        ledgers = [*self.followed.sequencing.sequencer.first_seqnos.items()]
        places = [SeqnoAnchor(seqno, before_ledger(ledger), inclusive=False) for ledger, seqno in ledgers]
        if request.anchor is not None:
            places.append(SeqnoAnchor(*request.anchor, inclusive=True))
        if (reached := self._reached.get(request.cursor)) is not None:
            places.append(reached)
        usable = [place for place in places if place.seqno <= request.first]
        if not usable:
            raise MutationsTrimmed(request.first, self.oldest(self.followed.buffer.first_ledger))
        return max(usable, key=lambda place: (place.seqno, place.position))

    def reached(self, cursor: str, rows: MutationBatch) -> None:
        """A read for a cursor has come so far; its next one goes on there."""
        self._reached[cursor] = SeqnoAnchor(rows.last + 1, rows.positions.last, inclusive=False)

    def left(self, cursor: str) -> None:
        """A cursor was closed."""
        self._reached.pop(cursor, None)

    def judged(self, placed: PlacedBatch, place: SeqnoAnchor) -> MutationBatch | None:
        """The visible records of messages from a place on, with their seqnos; None if there are none.

        All of them have been numbered. Raises MutationsTrimmed where what was read can't be judged any more,
        because it is trimmed meanwhile.
        """
        buffer = self.followed.buffer
        if placed.positions.first.ledger < buffer.first_ledger:
            raise MutationsTrimmed(place.seqno, self.oldest(buffer.first_ledger))
        counts = visible_counts(placed, buffer)
        if not counts.any():
            return None
        mutations = mutations_of(placed, counts, place.seqno, buffer)
        passed = mutations.positions.search(place.position, right=not place.inclusive)
        if passed:  # only where a read begins in the middle of a record set
            mutations = mutations.take(slice(passed, None))
            numbers = np.arange(place.seqno, place.seqno + len(mutations), dtype=np.int64)
            mutations = MutationBatch(numbers, mutations.positions, mutations.publish_times, mutations.messages)
        return mutations if len(mutations) else None


def oldest_seqno(followed: FollowedTopic, first_ledger: int) -> int:
    """The seqno of the first mutation that a topic still has if its log begins with a ledger."""
    sequencer = followed.sequencing.sequencer
    firsts = [seqno for ledger, seqno in [*sequencer.first_seqnos.items()] if ledger >= first_ledger]
    return min(firsts, default=sequencer.next_seqno)


def whole(position: Position) -> Position:
    """The message in which a record stands."""
    return position._replace(batch=NO_INDEX)


def mutations_in(placed: PlacedBatch, counts: Int64s, first: int, buffer: TransactionBuffer) -> Iterator[MutationBatch]:
    """As `mutations_of`, in batches of what can be unpacked together."""
    done = 0
    for piece in pieces(placed):
        told = counts[done : done + len(piece)]
        done += len(piece)
        if told.any():
            yield mutations_of(piece, told, first, buffer)
            first += int(told.sum())


def mutations_of(placed: PlacedBatch, counts: Int64s, first: int, buffer: TransactionBuffer) -> MutationBatch:
    """The visible records of messages, of which each holds `counts`, numbered from `first` on.

    Raises UndecodableRecordSet, and SeqnoGap where a record set holds another number of records than it says.
    """
    if not counts.all():
        placed = placed.take(np.flatnonzero(counts))
    records = expand(placed)
    if records is not placed:
        records = records.take(~buffer.suppressed.mask(records.positions))
    if len(records) != int(counts.sum()):
        raise SeqnoGap(f"{len(records)} records stand from {placed.positions.first} on, where {counts.sum()} were told")
    messages = records.messages
    properties = {name: column for name, column in messages.properties.items() if not name.startswith(RESERVED)}
    return MutationBatch(
        np.arange(first, first + len(records), dtype=np.int64),
        records.positions,
        records.publish_times,
        Batch(messages.keys, messages.values, properties, messages.event_times),
    )


At = int | ResumeToken

Facts = Callable[[str], Awaitable[tuple[FollowedTopic, TopicInfo]]]


class Cursors:
    """`facts` makes a topic one that has seqnos, and tells what is known of it.

    `limit`: cursors of a topic. `max_bytes`: one that keeps more than that from going is dropped, 0: none is.
    `dropped`: how many were.
    """

    def __init__(
        self, topics: Topics, scheduler: SnapshotScheduler, facts: Facts, *, limit: int, max_bytes: int
    ) -> None:
        self.dropped = 0
        self._topics = topics
        self._scheduler = scheduler
        self._facts = facts
        self._limit = limit
        self._max_bytes = max_bytes

    async def add(self, topic: str, name: object, at: At | str) -> int:
        """Begin to hold what stands behind a seqno or token, "beginning" or "now"; durable when this returns.

        One that is there stays where it is; where it stands. Raises TooManyCursors, StreamTrimmed, and as
        `acknowledged`.
        """
        cursor = check_cursor_name(name)
        followed, facts = await self._facts(topic)
        if cursor not in followed.cursors:
            if len(followed.cursors) >= self._limit:
                raise TooManyCursors(f"topic {topic!r} has {self._limit} cursors, no more may be: remove one")
            if isinstance(at, str):
                at = facts.high_seqno if at == "now" else facts.trimmed_seqno
            if (seqno := acknowledged(at, topic, facts)) < facts.trimmed_seqno:
                raise StreamTrimmed(
                    f"topic {topic!r} is trimmed up to seqno {facts.trimmed_seqno}: nothing behind {seqno} can be held"
                )
            followed.cursors = {**followed.cursors, cursor: seqno}
        await self._persist(topic)
        followed, facts = await self._facts(topic)
        if followed.cursors.get(cursor, -1) < facts.trimmed_seqno:  # retention was at it meanwhile
            raise StreamTrimmed(
                f"topic {topic!r} is trimmed up to seqno {facts.trimmed_seqno}, so cursor {cursor!r} does not hold all "
                "that it should: remove it, and start over"
            )
        return followed.cursors[cursor]

    async def advance(self, topic: str, name: object, at: At) -> int:
        """Let go of what stands up to a seqno or token; where the cursor stands then. An older one changes nothing.

        It is kept with the next snapshot of the topic. Raises UnknownCursor, and as `acknowledged`.
        """
        cursor = check_cursor_name(name)
        followed, facts = await self._facts(topic)
        known = followed.cursors.get(cursor)
        if known is None:
            raise UnknownCursor(f"topic {topic!r} has no cursor {cursor!r}: it was removed, dropped or never made")
        seqno = max(acknowledged(at, topic, facts), min(known, facts.high_seqno))
        followed.cursors = {**followed.cursors, cursor: seqno}
        return seqno

    async def remove(self, topic: str, name: object) -> None:
        """Hold nothing for it any more; durable when this returns. Raises UnknownCursor."""
        cursor = check_cursor_name(name)
        followed, _ = await self._facts(topic)
        if cursor not in followed.cursors:
            raise UnknownCursor(f"topic {topic!r} has no cursor {cursor!r} to remove")
        followed.cursors = {one: seqno for one, seqno in followed.cursors.items() if one != cursor}
        await self._persist(topic)

    def rows(self) -> list[dict[str, Any]]:
        """All cursors by topic and name: where each stands, and how many mutations are behind it."""
        rows = []
        for name, topic in sorted(self._topics.by_name.items()):
            if topic.followed is None:
                continue
            high = topic.followed.sequencing.sequencer.next_seqno - 1
            for cursor, seqno in sorted(topic.followed.cursors.items()):
                needed = first_needed(seqno, dict(topic.followed.sequencing.sequencer.first_seqnos))
                held = {"seqno": seqno, "items_remaining": max(high - seqno, 0), "first_ledger": needed}
                rows.append({"topic": name, "cursor": cursor, **held})
        return rows

    def floor(self, topic: str, ledgers: Sequence[Ledger], wanted: int) -> int | None:
        """The lowest ledger that a cursor of a topic needs, where retention wants to keep those from `wanted` on.

        Cursors that keep too much from going are dropped first.
        """
        found = self._topics.get(topic)
        if found is None or (followed := found.followed) is None:
            return None
        firsts = dict(followed.sequencing.sequencer.first_seqnos)
        kept: dict[str, int] = {}
        floor: int | None = None
        for name, seqno in followed.cursors.items():
            needed = first_needed(seqno, firsts)
            if needed is not None:
                held = sum(ledger.bytes for ledger in ledgers if needed <= ledger.ledger < wanted)
                if self._max_bytes and held > self._max_bytes:
                    self.dropped += 1
                    continue
                floor = needed if floor is None else min(floor, needed)
            kept[name] = seqno
        if len(kept) < len(followed.cursors):
            followed.cursors = kept
        return floor

    async def _persist(self, topic: str) -> None:
        await self._scheduler.snapshot([topic])
        if self._scheduler.problem is not None:
            raise self._scheduler.problem
