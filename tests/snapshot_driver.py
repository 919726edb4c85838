"""Helpers of snapshot tests: owners on a memory broker, the log itself, and brokers that interfere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from broker_io.memory.topic import LedgerLog
from broker_io.port import Ledger
from broker_io.position import EARLIEST, Position, Positions
from snapshots.format import SNAPSHOT_TOPIC, EndEntry, Stored
from snapshots.scan import TopicEntries, scan
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.follow import read_existing, visible_records
from txnbuffer.mutations.index import SnapshotIndex, SnapshotIndexEntry
from txnbuffer.recovery.bounds import BoundsCheck
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.recovery.verify import diff_states, rebuild

NEVER = SnapshotPolicy(changes=10**9, interval_ms=10**9, recovery_target=1e9)
"""A policy with which snapshots are written only on request."""

SMALL = 1160
"""A limit of entry bytes above which all but the smallest states overflow."""


def manager_on(broker: Any, **options: Any) -> LogOwner:
    """An owner that has recovered; segments of 3 items unless `options` say otherwise."""
    made = LogOwner(broker, **{"policy": NEVER, "segment_size": 3, **options})
    made.recover()
    return made


def abort_some(writer: TopicWriter, *txns: int) -> None:
    for txn in txns:
        writer.records(txn, "x")
        writer.abort(txn)


def leave_empty(broker: MemoryBroker, topic: str) -> None:
    """Close the newest ledger of a topic, which is empty, as the promotion of a member of a pair does."""
    log = broker._topic(topic)
    assert not log.ledgers[-1].entries
    log.ledgers[-1].closed = True
    log.ledgers.append(LedgerLog(log._new_ledger()))


def with_entries(found: TopicEntries, kind: str, entries: dict[int, Stored]) -> TopicEntries:
    """The entries of a topic with others of one kind."""
    return replace(found, numbered={**found.numbered, kind: entries})


def entries(broker: Any, topic: str) -> TopicEntries:
    return scan(broker, only=topic).topics.get(topic, TopicEntries())


def written(broker: Any, after: Position = EARLIEST) -> list[Message]:
    """The messages of the snapshot topic after a position, in order."""
    messages: list[Message] = []
    with broker.reader(SNAPSHOT_TOPIC, after, inclusive=False) as reader:
        while (placed := reader.read()) is not None:
            messages += placed.messages
    return messages


def visible_positions(broker: Any, owner: LogOwner, topic: str) -> list[Position]:
    """The positions of the mutations 1, 2, … of a topic that was never trimmed."""
    buffer = owner.buffer(topic)
    placed = read_existing(broker, topic, EARLIEST, buffer.decided_position)
    return [position for batch in placed for position in visible_records(batch, buffer).positions]


def add_bounds(broker: Any, owner: LogOwner, topic: str, *ends: int, segment_entries: int = 2) -> None:
    """Add mutation snapshots that end with these seqnos, each after the one before, as a stream's manager does."""
    followed = owner.followed(topic)
    index = SnapshotIndex(followed.index, segment_entries=segment_entries)
    positions = visible_positions(broker, owner, topic)
    for end in ends:
        start = index.end + 1
        bounds = SnapshotIndexEntry(start, end, positions[start - 1], positions[end - 1], end - start + 1)
        index.add(bounds)
    followed.index = index.state()


def bounds_of(owner: LogOwner, topic: str) -> list[tuple[int, int]]:
    """First and last seqno of each mutation snapshot that the owner knows."""
    return [(entry.start, entry.end) for entry in SnapshotIndex(owner.followed(topic).index)]


def assert_true(owner: LogOwner, broker: MemoryBroker, topic: str) -> None:
    """Assert that the owner's buffer equals one built from the whole log, and its mutation snapshots agree with it."""
    assert topic not in owner.problems, owner.problems
    mine: TransactionBuffer = owner.buffer(topic)
    bounds = BoundsCheck(SnapshotIndex(owner.followed(topic).index))
    end = broker.last_position(topic)
    log, sequencer = rebuild(broker, topic, segment_size=mine.segments.segment_size, until=end, bounds=bounds)
    assert bounds.index()[1] == []
    log.trim(mine.first_ledger)
    differences = diff_states(mine, log)
    assert differences == [], differences
    assert owner.followed(topic).numbered.next_seqno == sequencer.next_seqno
    assert owner.followed(topic).numbered.first_seqnos == sequencer.first_seqnos


def put(broker: MemoryBroker, *messages: Message, topic: str = SNAPSHOT_TOPIC) -> list[Position]:
    """Append messages to a topic as its exclusive writer, to simulate messages of other processes."""
    with broker.writer(topic, exclusive=True) as writer:
        return list(writer.append(Batch.of(messages)).result())


def forget_origins(patch: pytest.MonkeyPatch) -> None:
    """Let logs in memory not know whether they were trimmed, as a cluster."""
    patch.setattr(LedgerLog, "describe", lambda self, _: Ledger(self.number, self.entries, self.bytes, self.closed))


class Interfering:
    """A broker that lets a test observe and change the calls of its user.

    `before` is called with the name of each method and its topic; `appended` may insert messages before those that an
    exclusive writer appends.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self.inner = broker
        self.before: Callable[[str, str], None] = lambda name, topic: None
        self.foreign: list[list[Message]] = []
        self.limit = 65_536
        self.reads = 0

    def topics(self) -> list[str]:
        return self.inner.topics()

    def __getattr__(self, name: str) -> Any:
        def call(topic: str, *rest: Any, **options: Any) -> Any:
            self.before(name, topic)
            return getattr(self.inner, name)(topic, *rest, **options)

        return call

    def writer(self, topic: str, *, exclusive: bool = False, wait: float | None = None, alone: bool = False) -> Any:
        inner = self.inner.writer(topic, exclusive=exclusive, wait=wait)
        if topic != SNAPSHOT_TOPIC:
            return inner
        outer = self

        class Writer:
            def append(self, batch: Batch) -> Future[Positions]:
                if outer.foreign:
                    inner.append(Batch.of(outer.foreign.pop(0))).result()
                outer.before("append", topic)
                return inner.append(batch)

            def close(self) -> None:
                inner.close()

        return Writer()

    def reader(self, topic: str, *rest: Any, **options: Any) -> Any:
        self.before("reader", topic)
        inner = self.inner.reader(topic, *rest, **options)
        outer = self

        class Reader:
            def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> Any:
                outer.reads += 1
                outer.before("read", topic)
                return inner.read(limit=min(limit, outer.limit), timeout=timeout)

            def close(self) -> None:
                inner.close()

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                inner.close()

        return Reader()


def stored(topic: str = "t", txns: Iterable[int] = range(1, 12), **options: Any) -> tuple[Any, LogOwner, TopicWriter]:
    """A broker with a snapshot of three segments, the owner that wrote it, and a writer of its topic."""
    broker = MemoryBroker(ledger_entries=9)
    owner = manager_on(broker, **options)
    owner.register(topic)
    writer = TopicWriter(broker, topic)
    writer.plain("p")
    abort_some(writer, *txns)
    owner.pump()
    owner.snapshot(topic)
    return broker, owner, writer


def end_of(broker: Any, topic: str = "t") -> EndEntry:
    return EndEntry.decode(entries(broker, topic).end.value)


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def trimmed_to(broker: Any, ledger: int, topic: str = "t") -> int:
    """Drop ledgers as retention without regard to the floor does."""
    broker.trim(topic, ledger)
    return broker.ledgers(topic)[0].ledger
