"""A naive model for tests of the mutation manager: the whole topic as a list, and a log that reads from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from broker_io.position import Position
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.cursor import Cursor, Slice
from txnbuffer.mutations.manager import CursorStatistics, Effect, MutationManager, ReadLog, StopReading, Wake
from txnbuffer.mutations.snapshot import SNAPSHOT_BYTES, MutationSnapshot, index_bytes

Table = dict[bytes, bytes | None]


class Topic:
    """All visible mutations of a topic, numbered from 1, as a list.

    Compaction empties some of them in the log: those in `emptied`. Those in `unknown` were emptied before anybody
    followed the topic.
    """

    def __init__(self) -> None:
        self.rows: list[Mutation] = []
        self.unknown: set[int] = set()
        self.emptied: set[int] = set()

    @property
    def high(self) -> int:
        return len(self.rows)

    def add(self, pairs: Sequence[tuple[bytes | None, bytes | None]], emptied: Collection[int] = ()) -> MutationBatch:
        """Add mutations; they are returned as a batch to queue. `emptied`: the numbers of pairs that are emptied."""
        first = self.high + 1
        self.unknown |= {first + number for number in emptied if number < len(pairs)}
        rows = [
            Mutation(seqno, position_of(seqno), key, value, {"n": str(seqno % 3)}, 0, seqno)
            for seqno, (key, value) in enumerate(pairs, first)
        ]
        self.rows += rows
        return self._batch(rows, self.unknown)

    def between(self, first: int, last: int) -> list[Mutation]:
        return [row for row in self.rows[first - 1 : last] if row.seqno not in self.unknown]

    def batch(self, first: int, last: int) -> MutationBatch:
        """Mutations as the log has them."""
        return self._batch(self.rows[first - 1 : last], self.unknown | self.emptied)

    def _batch(self, rows: list[Mutation], emptied: set[int]) -> MutationBatch:
        removed = np.array([row.seqno in emptied for row in rows], np.bool_)
        kept = [
            Mutation(row.seqno, row.position, None, None, {}, 0, row.publish_time) if row.seqno in emptied else row
            for row in rows
        ]
        return replace(MutationBatch.of(kept), removed=removed if removed.any() else None)

    def empty(self, upto: int, chosen: Callable[[int], bool]) -> None:
        """Empty chosen mutations up to a seqno that have a newer one of their key at or below it."""
        newest = {row.key: row.seqno for row in self.between(1, upto)}
        self.emptied |= {
            row.seqno
            for row in self.between(1, upto)
            if row.key is not None and newest[row.key] > row.seqno and chosen(row.seqno)
        }

    def table(self, upto: int) -> Table:
        """The newest mutation of each key as of a seqno."""
        return {row.key: row.value for row in self.between(1, upto) if row.key is not None}

    def unique(self, first: int, last: int) -> list[Mutation]:
        """The mutations of a snapshot from one seqno to another: the newest of each key, and all without a key."""
        newest = {row.key: row.seqno for row in self.between(first, last)}
        return [row for row in self.between(first, last) if row.key is None or newest[row.key] == row.seqno]


def position_of(seqno: int) -> Position:
    return Position(seqno // 10, seqno % 10)


class Reads:
    """The pending reads of the log that a manager requested, and the cursors that it woke."""

    def __init__(self, topic: Topic, manager: MutationManager) -> None:
        self.topic = topic
        self.manager = manager
        self.open: dict[int, ReadLog] = {}
        self.woken: list[str] = []

    def collect(self) -> list[Effect]:
        self.manager.backfill_memory.give_turns()
        effects = self.manager.take_effects()
        for effect in effects:
            match effect:
                case ReadLog():
                    assert effect.first <= effect.last <= self.topic.high
                    assert effect.max_bytes > 0
                    if effect.anchor is not None:
                        assert effect.anchor.seqno <= effect.first
                        assert effect.anchor.position == position_of(effect.anchor.seqno)
                    self.open[effect.ticket] = effect
                case StopReading(ticket):
                    del self.open[ticket]
                case Wake(cursor):
                    self.woken.append(cursor)
        return effects

    def answer(self, rows: int = 1_000_000) -> bool:
        """Complete the oldest read, once a turn is free, with at most `rows` mutations; whether there was one."""
        self.collect()
        while not self.open and self.manager.backfill_memory.waiting:
            self.manager.backfill_memory.tick()
            self.collect()
        if not self.open:
            return False
        read = self.open.pop(min(self.open))
        found = self.topic.batch(read.first, min(read.last, read.first + rows - 1))
        self.manager.backfilled(read.ticket, next(found.parts(read.max_bytes)))
        self.collect()
        return True


class Reader:
    """Reads a cursor and compares every snapshot with the naive topic. `table`: what the reader has; None: it has all.

    `took`: the number of slices of the last `take`.
    """

    def __init__(self, topic: Topic, cursor: Cursor, at_least: int = 0, table: Table | None = None) -> None:
        self.topic = topic
        self.cursor = cursor
        self.complete = cursor.after
        self.at_least = at_least
        self.table = topic.table(cursor.after) if table is None else table
        self.took = 0
        self.snapshots: list[tuple[int, int]] = []
        self._repeats = False
        self._begun: tuple[int, int] | None = None
        self._rows: list[Mutation] = []

    @property
    def rows(self) -> list[Mutation]:
        """The mutations of the incomplete snapshot."""
        return self._rows

    def take(self, limit: int = 1_000_000, max_bytes: int = 2**62) -> int:
        """Read once; the number of mutations."""
        slices = self.cursor.take(limit, max_bytes)
        for one in slices:
            self.check(one)
        self.took = len(slices)
        count = sum(len(one.rows) for one in slices)
        assert count <= limit
        return count

    def check(self, one: Slice) -> None:
        if one.begins:
            self._begins(one)
        assert self._begun == (one.start, one.end)
        assert one.rows.removed is None
        for row in one.rows:
            assert row.seqno > (self._rows[-1].seqno if self._rows else self.complete)
            self._rows.append(row)
            if row.key is not None:
                self.table[row.key] = row.value
        assert not len(one.rows) or self.cursor.after >= one.rows.last
        if one.ends:
            newest = {row.key: row.seqno for row in self._rows}
            kept = [row for row in self._rows if row.key is None or newest[row.key] == row.seqno]
            assert kept == self.topic.unique(one.start, one.end)
            assert self._repeats or kept == self._rows
            assert self.table == self.topic.table(one.end)
            self.snapshots.append((one.start, one.end))
            self.complete = one.end
            self._begun = None
            self._rows = []

    def _begins(self, one: Slice) -> None:
        """A snapshot begins, or the incomplete one again: with a later end, or as one in which keys may repeat."""
        if self._begun is None:
            assert one.start == self.complete + 1
            assert one.end >= self.at_least
        else:
            assert one.start == self._begun[0]
            assert one.repeats
            assert one.end > self._begun[1] or (one.end == self._begun[1] and not self._repeats)
        self._begun = (one.start, one.end)
        self._repeats = one.repeats

    def drain(self, reads: Reads) -> None:
        """Read everything, with all reads of the log completed."""
        for _ in range(10_000):
            self.take()
            if not self.took and not reads.answer():
                return
        raise AssertionError("a cursor never reaches its end")


def check_chain(manager: MutationManager) -> None:
    """Check the invariants of the snapshots in memory between two calls."""
    snapshots = list(manager.chain)
    assert snapshots[0] is manager.chain.oldest
    assert snapshots[-1] is manager.chain.open
    assert not snapshots[-1].closed
    pinning = [cursor for cursor in manager.cursors.values() if cursor.pin is not None]
    pins = [cursor.pin for cursor in pinning]
    for snapshot in snapshots:
        assert snapshot.pins == sum(pin is snapshot for pin in pins)
        at_end = [cursor for cursor in pinning if cursor.pin is snapshot and cursor.after >= snapshot.end]
        assert snapshot.passed == (0 if snapshot.empty else len(at_end))
        assert snapshot.persistence == (manager.persistence is snapshot)
        assert snapshot.bytes == counted_bytes(snapshot)
        assert snapshot.rows == 0 or not snapshot.empty
        keys = [row.key for chunk in snapshot.chunks for row in chunk.living() if row.key is not None]
        assert len(keys) == len(set(keys))
        assert not (snapshot.closed and snapshot.empty)
    assert all(pin in snapshots for pin in pins)
    for older, newer in itertools.pairwise(snapshots):
        assert older.closed
        assert (older.newer, newer.older) == (newer, older)
        assert newer.start == older.end + 1
    oldest = snapshots[0]
    assert oldest is manager.chain.open or oldest.pins or oldest.persistence
    opened = manager.chain.open
    assert opened.empty or not (opened.pins or opened.persistence), "a cursor is in an open snapshot"
    assert manager.chain.account.bytes == sum(snapshot.bytes for snapshot in snapshots)
    backfills = [cursor.backfill.bytes for cursor in manager.cursors.values() if cursor.backfill is not None]
    own = [
        cursor.reading.bytes
        for cursor in manager.cursors.values()
        if cursor.reading is not None and cursor.reading is not cursor.pin
    ]
    assert manager.backfills.bytes == sum(backfills) + sum(own)
    parts = manager.chain.account.bytes + manager.backfills.bytes + manager.leaving.bytes
    assert manager.account.bytes == parts
    assert manager.leaving.bytes >= 0


def check_turns(manager: MutationManager) -> None:
    """Check that backfills without a turn have nothing in memory, and that no turn stays free while others wait."""
    memory = manager.backfill_memory
    backfills = [cursor.backfill for cursor in manager.cursors.values() if cursor.backfill is not None]
    assert memory.active == len(backfills)
    assert memory.turns.keys() <= {*backfills}
    assert memory.waiting.keys() <= {*backfills} - memory.turns.keys()
    assert len(memory.turns) <= memory.most_turns
    assert not memory.waiting or len(memory.turns) == memory.most_turns
    assert not any(one.bytes or one.ticket is not None for one in backfills if one not in memory.turns)


def counted_bytes(snapshot: MutationSnapshot) -> int:
    """Bytes of a snapshot, recounted."""
    assert [chunk.bytes for chunk in snapshot.chunks] == [chunk.rows.nbytes() for chunk in snapshot.chunks]
    index = snapshot._index
    return (
        SNAPSHOT_BYTES
        + sum(chunk.rows.nbytes() for chunk in snapshot.chunks)
        + index_bytes(index, sum(len(key or b"") for key in index))
    )


def pairs(text: str) -> list[tuple[bytes | None, bytes | None]]:
    """Parse `k1=v1 k2=v2 k1- =v3`: keys with values, a deleted key, a value without a key."""
    found: list[tuple[bytes | None, bytes | None]] = []
    for word in text.split():
        key, equals, value = word.rstrip("-").partition("=")
        found.append((key.encode() or None, value.encode() if equals else None))
    return found


class Stage:
    """One topic, its manager and its log, for tests of step-by-step scenarios."""

    def __init__(self, text: str = "", **options: int) -> None:
        self.topic = Topic()
        self.manager = MutationManager(**options)  # type: ignore[arg-type]  # all options given are numbers
        self.reads = Reads(self.topic, self.manager)
        if text:
            self.queue(text)

    def queue(self, text: str) -> None:
        """Queue mutations as one batch."""
        self.manager.queue_many(self.topic.add(pairs(text)))
        check_chain(self.manager)

    def each(self, text: str) -> None:
        """Queue mutations one by one."""
        for word in text.split():
            self.queue(word)

    def reader(self, name: str, after: int, **options: int) -> Reader:
        cursor = self.manager.register(name, after, **options)
        check_chain(self.manager)
        return Reader(self.topic, cursor, options.get("snapshot_end", 0))

    def ranges(self) -> list[tuple[int, int]]:
        """Start and end seqno of each snapshot in memory that has mutations."""
        return [(snapshot.start, snapshot.end) for snapshot in self.manager.chain if snapshot.rows]

    def contents(self) -> list[str]:
        """The snapshots in memory in the form of `pairs`, the open one included, "" for an empty one."""
        return [
            " ".join(_word(row) for chunk in snapshot.chunks for row in chunk.living())
            for snapshot in self.manager.chain
        ]

    def statistics(self, name: str) -> CursorStatistics:
        return next(one for one in self.manager.cursor_statistics() if one.name == name)

    def drain(self, *readers: Reader) -> None:
        for reader in readers:
            reader.drain(self.reads)
            check_chain(self.manager)


def _word(row: Mutation) -> str:
    key = (row.key or b"").decode()
    return f"{key}-" if row.value is None else f"{key}={row.value.decode()}"


def behind(stage: Stage, text: str = "z=0") -> Reader:
    """A slow cursor in a separate snapshot, so that later mutations stay in memory."""
    reader = stage.reader("slow", stage.topic.high)
    stage.queue(text)
    stage.manager.persist()
    return reader


def large(stage: Stage, key: str, size: int = 4_000) -> None:
    stage.manager.queue_many(stage.topic.add([(key.encode(), b"x" * size)]))
    check_chain(stage.manager)
