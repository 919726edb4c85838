"""Loading a topic in a reader process: its buffer from the newest snapshot, while the owner keeps writing.

A reader never writes. The entries that it reads may not belong together, because the owner writes and the broker
compacts meanwhile. So it reads on, and then again from the start, a limited number of times, before it reports damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker
from broker_io.position import Position
from snapshots.errors import SnapshotError, SnapshotMissing, UnsupportedSnapshot
from snapshots.scan import Scan
from snapshots.shard_count import snapshot_topic_of
from txnbuffer.buffer.buffer import SEGMENT_SIZE, TransactionBuffer
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.recovery.restore import Restored, before_ledger, fresh, restore
from txnbuffer.streams.failover import FailoverLog

ATTEMPTS = 5
"""Attempts to read a snapshot whose entries do not belong together."""


@dataclass(frozen=True, slots=True)
class LoadedTopic:
    """One topic as a reader starts with it.

    Apply the log to `buffer` after `resume`, and sequence it after `sequenced` (both exclusive). `buffer` knows at
    once what is decided up to `resume`; the rest once it is applied up to the end of the log. `registered` is False
    for a topic without a snapshot, which has no transactions: its whole log is to be applied, and its records have no
    seqnos yet. The snapshot covers the ledgers from `origin_ledger` on; the log still has those from `first_ledger` on.
    """

    topic: str
    incarnation: str
    buffer: TransactionBuffer
    sequencer: Sequencer
    resume: Position
    sequenced: Position
    first_ledger: int
    origin_ledger: int
    registered: bool
    failover: FailoverLog

    def anchor(self, start: Position) -> tuple[int | None, Position]:
        """The nearest position at or before `start` whose seqno is known: `(seqno, position)`.

        The first visible record after `position` (exclusive) has that seqno. If none is known, the seqno is None and
        `position` is right before `start`.
        """
        lowest = before_ledger(self.first_ledger)
        known = [(before_ledger(ledger), seqno) for ledger, seqno in self.sequencer.first_seqnos.items()]
        if self.registered:
            known.append((self.sequenced, self.sequencer.next_seqno))
        usable = [(at, seqno) for at, seqno in known if at == lowest or lowest < at < start]
        if not usable:
            return None, max(lowest, Position(start.ledger, start.entry - 1))
        at, seqno = max(usable)
        return seqno, at


def load(broker: Broker, topic: str, *, snapshot_topic: str | None = None) -> LoadedTopic:
    """One topic as its newest snapshot has it; writes nothing. `snapshot_topic`: that of the topic's shard if None.

    Raises TopicNotFound, SnapshotDamaged, UnsupportedSnapshot, AppliedPositionTrimmed.
    """
    snapshot_topic = snapshot_topic or snapshot_topic_of(broker, topic)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            restored = _attempt(broker, topic, snapshot_topic)
        except UnsupportedSnapshot:
            raise
        except (SnapshotError, PositionTrimmed):
            if attempt == ATTEMPTS:
                raise
        else:
            return _loaded(broker, restored)
    raise AssertionError("the last attempt returns or raises")


class SnapshotLoader:
    """Loads many topics with one scan of each snapshot topic, which is continued before each load.

    The entries of a topic are dropped when it is loaded; loading it again reads the snapshot topic again.
    """

    def __init__(self, broker: Broker, topics: Iterable[str]) -> None:
        self._broker = broker
        self._wanted = {*topics}
        self._scans: dict[str, Scan] = {}

    def load(self, topic: str) -> LoadedTopic:
        """As the function `load`, which is called if the scanned entries do not belong together."""
        if topic not in self._wanted:
            return load(self._broker, topic)
        snapshot_topic = snapshot_topic_of(self._broker, topic)
        try:
            return _loaded(self._broker, self._attempt(topic, snapshot_topic))
        except UnsupportedSnapshot:
            raise
        except SnapshotError:
            return load(self._broker, topic, snapshot_topic=snapshot_topic)
        except PositionTrimmed:
            self._close_scan(snapshot_topic)
            return load(self._broker, topic, snapshot_topic=snapshot_topic)
        finally:
            self._wanted.discard(topic)
            for running in self._scans.values():
                running.table.topics.pop(topic, None)

    def _attempt(self, topic: str, snapshot_topic: str) -> Restored:
        self._broker.incarnation(topic)  # as below
        if snapshot_topic not in self._scans:
            try:
                self._scans[snapshot_topic] = Scan(self._broker, snapshot_topic, self._wanted)
            except TopicNotFound:
                return _fresh(self._broker, topic)
        return _restored(self._broker, topic, snapshot_topic, self._scans[snapshot_topic])

    def _close_scan(self, snapshot_topic: str) -> None:
        if (running := self._scans.pop(snapshot_topic, None)) is not None:
            running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for snapshot_topic in [*self._scans]:
            self._close_scan(snapshot_topic)


def _attempt(broker: Broker, topic: str, snapshot_topic: str) -> Restored:
    broker.incarnation(topic)  # a missing data topic is distinguished from a missing snapshot topic
    try:
        running = Scan(broker, snapshot_topic, frozenset({topic}))
    except TopicNotFound:
        return _fresh(broker, topic)
    try:
        return _restored(broker, topic, snapshot_topic, running)
    finally:
        running.close()


def _restored(broker: Broker, topic: str, snapshot_topic: str, running: Scan) -> Restored:
    running.read_to_end()
    try:
        return restore(broker, running.table, topic, snapshot_topic=snapshot_topic, fall_back=False)
    except SnapshotError:
        running.read_to_end()  # a compaction may have hidden what a newer end entry replaced
    try:
        return restore(broker, running.table, topic, snapshot_topic=snapshot_topic, fall_back=False)
    except SnapshotMissing:
        return _fresh(broker, topic)


def _fresh(broker: Broker, topic: str) -> Restored:
    return fresh(topic, broker.incarnation(topic), broker.ledgers(topic), SEGMENT_SIZE)


def _loaded(broker: Broker, restored: Restored) -> LoadedTopic:
    return LoadedTopic(
        restored.topic,
        restored.incarnation,
        restored.buffer,
        restored.sequencer,
        restored.resume,
        restored.sequenced,
        broker.ledgers(restored.topic)[0].ledger,
        restored.origin_ledger,
        restored.snapshot is not None,
        restored.failover,
    )
