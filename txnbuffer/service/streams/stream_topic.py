"""A streamed topic: the feed of its mutation manager, positions of seqnos in the log, and durable cursors.

A topic has a feed from its first stream until a while after its last one. Mutations that were sequenced before the feed
existed are read from the log. Durable cursors are stored in the snapshots of their topics and limit retention.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.compaction import CompactionState
from broker_io.environment import current
from broker_io.errors import Error
from broker_io.port import Ledger
from broker_io.position import Int64s, Position, before_ledger
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import Sequenced, Sequencer, visible_counts
from txnbuffer.config import StreamsConfig
from txnbuffer.errors import MutationsTrimmed, StreamTrimmed, TooManyCursors, UnknownCursor
from txnbuffer.follow import visible_records
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.index import SnapshotIndex
from txnbuffer.mutations.manager import (
    BACKFILL_BYTES,
    MIN_SNAPSHOT_BYTES,
    SNAPSHOTS_PER_TOPIC,
    MemoryBudget,
    MutationManager,
    ReadLog,
)
from txnbuffer.protocol import RESERVED, removed_rows
from txnbuffer.recordset import batch_slices
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.topics.topics import Topics
from txnbuffer.service.topics.upkeep import SnapshotScheduler
from txnbuffer.streams.failover import ResumeToken
from txnbuffer.streams.server import TopicInfo, acknowledged, check_cursor_name, first_needed


class SeqnoAnchor(NamedTuple):
    """The first visible record at `position`, or after it if not `inclusive`, has the seqno `seqno`."""

    seqno: int
    position: Position
    inclusive: bool


class Feed:
    """Feeds a topic's mutation manager: call `attach`, then `begin`.

    `notify` is called in any thread when there is something to `take`. `problem`: the error that stopped the feed.
    `idle_since`: the time when its last stream ended, None while it has one. `purge_seqno`: as in `TopicInfo`.
    """

    manager: MutationManager

    def __init__(self, name: str, followed: FollowedTopic, notify: Callable[[], None], now: float) -> None:
        self.name = name
        self.followed = followed
        self.problem: Error | None = None
        self.idle_since: float | None = now
        self.purge_seqno = 0
        self._budget: MemoryBudget
        self._notify = notify
        self._lock = current().threads.lock()
        self._received: list[MutationBatch] = []
        self._reached: dict[str, tuple[SeqnoAnchor, SeqnoAnchor]] = {}

    def attach(self) -> int:
        """Receive messages sequenced from now on; return the last seqno before them. Sequencing must be paused."""
        self.followed.on_sequenced = self._on_sequenced
        return self.followed.numbered.next_seqno - 1

    def begin(self, high: int, budget: MemoryBudget) -> None:
        """Manage the mutations after `high`, within a memory budget."""
        self.manager = MutationManager(
            high,
            index=SnapshotIndex(self.followed.index),
            max_snapshot_bytes=budget.snapshot_bytes,
            backfill_bytes=max(min(BACKFILL_BYTES, 2 * budget.budget // SNAPSHOTS_PER_TOPIC), 2 * MIN_SNAPSHOT_BYTES),
            account=budget.account,
            backfill_memory=budget.backfill_memory,
        )
        self._budget = budget
        budget.add(self.name, self.manager)

    def _on_sequenced(self, placed: PlacedBatch, sequenced: Sequenced) -> None:
        """Queue sequenced messages; called in the thread that works on the followed topic."""
        start, stop, counts, first = sequenced
        if self.problem is not None or not counts.any():
            return
        try:
            rows = placed if (start, stop) == (0, len(placed)) else placed.take(slice(start, stop))
            mutations = [*mutations_in(rows, counts, first, self.followed.buffer)]
        except Error as error:  # the seqnos are assigned anyway, and the topic's transactions continue
            self.problem = error
        else:
            with self._lock:
                self._received += mutations
        self._notify()

    def take(self) -> bool:
        """Pass what was queued to the manager; return whether there was anything."""
        with self._lock:
            received, self._received = self._received, []
        for mutations in received:
            self.manager.queue_many(mutations)
        return bool(received)

    def compacted(self, state: CompactionState) -> None:
        """The log is compacted as `state` says, or may be so from now on. Everything numbered must have been taken."""
        self.manager.compacted(self.followed.numbered.last_in(state.cleaned))
        if (purge_seqno := self.followed.numbered.last_in(state.purged)) > self.purge_seqno:
            self.purge_seqno = purge_seqno
            self.manager.read_again(purge_seqno)

    def persist(self) -> None:
        """Include the index of mutation snapshots in the next snapshot of the buffer."""
        self.manager.trim(self.oldest())
        if self.manager.persist():
            self.followed.index = self.manager.index.state()

    def oldest(self) -> int:
        """The seqno of the first mutation that the log still has."""
        return self.followed.numbered.oldest(self.followed.buffer.first_ledger)

    def close(self) -> None:
        """Close the feed; its cursors must be closed."""
        self.followed.on_sequenced = None
        self.take()
        self.persist()
        self._budget.remove(self.name)

    # For reads of the log

    def read_start(self, request: ReadLog) -> SeqnoAnchor:
        """The last known position at or before a request's first seqno. Raises MutationsTrimmed."""
        ledgers = [*self.followed.numbered.first_seqnos.items()]
        known = bisect_right(ledgers, request.first, key=itemgetter(1))
        places = []
        if known:
            ledger, seqno = ledgers[known - 1]
            places.append(SeqnoAnchor(seqno, before_ledger(ledger), inclusive=False))
        if request.anchor is not None:
            places.append(SeqnoAnchor(*request.anchor, inclusive=True))
        places += self._reached.get(request.cursor, ())
        usable = [place for place in places if place.seqno <= request.first]
        if not usable:
            raise MutationsTrimmed(request.first, self.oldest())
        return max(usable, key=lambda place: (place.seqno, place.position))

    def reached(self, cursor: str, rows: MutationBatch) -> None:
        """Remember where a read for a cursor ended, for its next read, and where it began, if it must be repeated."""
        began = SeqnoAnchor(rows.first, rows.positions.first, inclusive=True)
        self._reached[cursor] = began, SeqnoAnchor(rows.last + 1, rows.positions.last, inclusive=False)

    def forget_cursor(self, cursor: str) -> None:
        """Forget a closed cursor."""
        self._reached.pop(cursor, None)

    def visible(self, placed: PlacedBatch, place: SeqnoAnchor) -> MutationBatch | None:
        """The visible records of sequenced messages from `place` on, with their seqnos; None if there are none.

        Raises MutationsTrimmed if the messages were trimmed meanwhile: their visibility is then unknown.
        """
        buffer = self.followed.buffer
        if placed.positions.first.ledger < buffer.first_ledger:
            raise MutationsTrimmed(place.seqno, self.oldest())
        counts = visible_counts(placed, buffer)
        if not counts.any():
            return None
        mutations = mutations_of(placed, counts, place.seqno, buffer)
        passed = mutations.positions.search(place.position, right=not place.inclusive)
        if passed:  # only if a read starts in the middle of a record set
            mutations = mutations.take(slice(passed, None))
            numbers = np.arange(place.seqno, place.seqno + len(mutations), dtype=np.int64)
            mutations = replace(mutations, seqnos=numbers)
        return mutations if len(mutations) else None


def mutations_in(placed: PlacedBatch, counts: Int64s, first: int, buffer: TransactionBuffer) -> Iterator[MutationBatch]:
    """As `mutations_of`, in batches that can be unpacked together."""
    done = 0
    for piece in batch_slices(placed):
        piece_counts = counts[done : done + len(piece)]
        done += len(piece)
        if piece_counts.any():
            yield mutations_of(piece, piece_counts, first, buffer)
            first += int(piece_counts.sum())


def mutations_of(placed: PlacedBatch, counts: Int64s, first: int, buffer: TransactionBuffer) -> MutationBatch:
    """The visible records of messages, of which each contains `counts`, with seqnos from `first` on.

    Raises UndecodableRecordSet, and SeqnoGap if a record set contains another number of records than it declares.
    """
    records = visible_records(placed, buffer, counts)
    messages = records.messages
    properties = {name: column for name, column in messages.properties.items() if not name.startswith(RESERVED)}
    return MutationBatch(
        np.arange(first, first + len(records), dtype=np.int64),
        records.positions,
        records.publish_times,
        Batch(messages.keys, messages.values, properties, messages.event_times),
        removed_rows(messages),
    )


def compactable(followed: FollowedTopic, last: int, bound: int | None) -> int:
    """The last ledger, at most `last`, that ends at or below the seqno `bound` (None: any); 0 if none does.

    Ledgers up to `last` are wholly numbered.
    """
    numbered = followed.numbered
    if bound is None:
        return last
    ledgers, firsts = [*numbered.first_seqnos], [*numbered.first_seqnos.values(), numbered.next_seqno]
    below = bisect_right(firsts, bound + 1) - 1  # so many ledgers end at or below the bound
    if below <= 0:
        return 0
    return min(last, ledgers[below] - 1) if below < len(ledgers) else last


CursorPosition = int | ResumeToken

InfoOf = Callable[[str], Awaitable[tuple[FollowedTopic, TopicInfo]]]


def cursor_rows(topic: str, cursors: Mapping[str, int], numbered: Sequencer) -> list[dict[str, Any]]:
    """The durable cursors of a topic, with their seqnos and the number of mutations after them."""
    firsts, high, rows = dict(numbered.first_seqnos), numbered.next_seqno - 1, []
    for cursor, seqno in sorted(cursors.items()):
        held = {"seqno": seqno, "items_remaining": max(high - seqno, 0), "first_ledger": first_needed(seqno, firsts)}
        rows.append({"topic": topic, "cursor": cursor, **held})
    return rows


class Cursors:
    """Durable cursors of all topics. `info` registers a topic if needed and describes it.

    `dropped`: the number of cursors that were dropped because they kept too much data from being trimmed.
    """

    def __init__(self, topics: Topics, scheduler: SnapshotScheduler, info: InfoOf, config: StreamsConfig) -> None:
        self.dropped = 0
        self._topics = topics
        self._scheduler = scheduler
        self._info = info
        self._limit = config.max_cursors
        self._max_bytes = config.cursor_bytes

    async def add(self, topic: str, name: object, at: CursorPosition | str) -> int:
        """Create a cursor after a seqno or token, at "beginning" or "now"; durable when this returns.

        An existing cursor keeps its seqno. Return the cursor's seqno. Raises TooManyCursors, StreamTrimmed, and as
        `acknowledged`.
        """
        cursor = check_cursor_name(name)
        followed, info = await self._info(topic)
        if cursor not in followed.cursors:
            if len(followed.cursors) >= self._limit:
                text = f"topic {topic!r} has {self._limit} cursors, the maximum (streams.max_cursors): remove one"
                raise TooManyCursors(text, "streams.max_cursors")
            if isinstance(at, str):
                at = info.high_seqno if at == "now" else info.trimmed_seqno
            if (seqno := acknowledged(at, topic, info)) < info.trimmed_seqno:
                raise StreamTrimmed(
                    f"topic {topic!r} is trimmed up to seqno {info.trimmed_seqno}: a cursor can't start at {seqno}"
                )
            followed.cursors = {**followed.cursors, cursor: seqno}
        await self._persist(topic)
        followed, info = await self._info(topic)
        if followed.cursors.get(cursor, -1) < info.trimmed_seqno:  # retention has trimmed meanwhile
            raise StreamTrimmed(
                f"topic {topic!r} is trimmed up to seqno {info.trimmed_seqno}, so cursor {cursor!r} has lost "
                "data: remove it and start over"
            )
        return followed.cursors[cursor]

    async def advance(self, topic: str, name: object, at: CursorPosition) -> int:
        """Move a cursor to a seqno or token; an older one changes nothing. Return the cursor's seqno.

        It is stored with the topic's next snapshot. Raises UnknownCursor, and as `acknowledged`.
        """
        cursor = check_cursor_name(name)
        followed, info = await self._info(topic)
        known = followed.cursors.get(cursor)
        if known is None:
            raise UnknownCursor(f"topic {topic!r} has no cursor {cursor!r}: it was removed, dropped or never created")
        seqno = max(acknowledged(at, topic, info), min(known, info.high_seqno))
        followed.cursors = {**followed.cursors, cursor: seqno}
        return seqno

    async def remove(self, topic: str, name: object) -> None:
        """Remove a cursor; durable when this returns. Raises UnknownCursor."""
        cursor = check_cursor_name(name)
        followed, _ = await self._info(topic)
        if cursor not in followed.cursors:
            raise UnknownCursor(f"topic {topic!r} has no cursor {cursor!r} to remove")
        followed.cursors = {one: seqno for one, seqno in followed.cursors.items() if one != cursor}
        await self._persist(topic)

    def rows(self) -> list[dict[str, Any]]:
        """All cursors by topic and name, with their seqnos and the number of mutations after them."""
        rows = []
        for name, topic in sorted(self._topics.by_name.items()):
            if topic.followed is not None:
                rows += cursor_rows(name, topic.followed.cursors, topic.followed.numbered)
        return rows

    def floor(self, topic: str, ledgers: Sequence[Ledger], wanted: int) -> int | None:
        """The lowest ledger that a cursor of a topic needs, if retention keeps those from `wanted` on anyway.

        Cursors that keep more than the configured bytes from being trimmed are dropped first.
        """
        found = self._topics.get(topic)
        if found is None or (followed := found.followed) is None:
            return None
        firsts = dict(followed.numbered.first_seqnos)
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
