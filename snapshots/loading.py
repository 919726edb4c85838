"""What a reader process needs of a topic: its buffer as the newest snapshot has it, while the owner writes on.

A reader never writes. What it reads may not belong together, for the owner writes and the broker
compacts meanwhile; then it reads on, and anew, a bounded number of times, before it believes in damage.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker
from broker_io.position import Position
from snapshots.errors import SnapshotError, SnapshotMissing, UnsupportedSnapshot
from snapshots.recovery import Restored, before_ledger, fresh, restore
from snapshots.shards import snapshot_topic_of
from snapshots.table import Scan
from txnbuffer.buffer.buffer import PART_SIZE, TransactionBuffer
from txnbuffer.buffer.sequencer import Sequencer
from txnbuffer.streams.failover import FailoverLog

ATTEMPTS = 5
"""So often a snapshot whose entries don't belong together is read anew."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One topic as a reader starts with it.

    Apply the log to `buffer` behind `resume`, number it behind `numbered` (both exclusive). What `buffer` calls
    decided is decided from the first moment; it knows the rest once it was applied up to the end of the log.
    `registered` is False for a topic without a snapshot, which has no transactions: its whole log is to be
    applied, and its records have no seqnos yet. The snapshot tells of all from `origin_ledger` on, the log still
    has what stands from `first_ledger` on.
    """

    topic: str
    incarnation: str
    buffer: TransactionBuffer
    sequencer: Sequencer
    resume: Position
    numbered: Position
    first_ledger: int
    origin_ledger: int
    registered: bool
    failover: FailoverLog

    def anchor(self, start: Position) -> tuple[int | None, Position]:
        """The nearest place at or below `start` whose seqno is known: `(seqno, position)`.

        The first visible record behind `position` (exclusive) has that seqno. Where none is known the seqno is
        None and reading can begin right before `start`.
        """
        lowest = before_ledger(self.first_ledger)
        known = [(before_ledger(ledger), seqno) for ledger, seqno in self.sequencer.first_seqnos.items()]
        if self.registered:
            known.append((self.numbered, self.sequencer.next_seqno))
        usable = [(at, seqno) for at, seqno in known if at == lowest or lowest < at < start]
        if not usable:
            return None, max(lowest, Position(start.ledger, start.entry - 1))
        at, seqno = max(usable)
        return seqno, at


def load(broker: Broker, topic: str, *, snapshot_topic: str | None = None) -> Loaded:
    """One topic as its newest snapshot has it, without writing anything; of its shard's snapshots unless told.

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


def _attempt(broker: Broker, topic: str, snapshot_topic: str) -> Restored:
    broker.incarnation(topic)  # a missing data topic is told apart from a missing snapshot topic
    try:
        running = Scan(broker, snapshot_topic, topic)
    except TopicNotFound:
        return fresh(topic, broker.incarnation(topic), broker.ledgers(topic), PART_SIZE)
    try:
        running.read_to_end()
        try:
            return restore(broker, running.table, topic, snapshot_topic=snapshot_topic, fall_back=False)
        except SnapshotError:
            running.read_to_end()  # a compaction may have hidden what a newer end entry replaced
        try:
            return restore(broker, running.table, topic, snapshot_topic=snapshot_topic, fall_back=False)
        except SnapshotMissing:
            return fresh(topic, broker.incarnation(topic), broker.ledgers(topic), PART_SIZE)
    finally:
        running.close()


def _loaded(broker: Broker, restored: Restored) -> Loaded:
    return Loaded(
        restored.topic,
        restored.incarnation,
        restored.buffer,
        restored.sequencer,
        restored.resume,
        restored.renumber,
        broker.ledgers(restored.topic)[0].ledger,
        restored.origin_ledger,
        restored.snapshot is not None,
        restored.failover,
    )
