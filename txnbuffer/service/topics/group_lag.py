"""The lag of consumer groups: how many committed records of a topic follow the position of a group

Markers and records of aborted transactions do not count. Records of open transactions count once they are committed
and all before them is decided, because the group can't read them earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from broker_io.port import Broker, Ledger, messages_up_to
from broker_io.position import EARLIEST, LATEST, NO_INDEX, Position, Positions, before_ledger
from txnbuffer.buffer.state import AbortedSet, SuppressedRanges
from txnbuffer.buffer.visibility import PinnedVisibility, Sequencer, SequencerState, visible_counts
from txnbuffer.follow import SequencedFollower, read_existing, visible_records
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.restore import load

READ_TIMEOUT = 5.0
"""Seconds within which the next messages of a topic must be read."""
MOST_READ = 100_000
"""Records of a topic without transactions that are read to count them; each later entry counts as one record."""
EVERYTHING = PinnedVisibility(AbortedSet(), SuppressedRanges(), LATEST)


@dataclass(frozen=True, slots=True)
class NumberedLog:
    """What the visible records of a topic are, and how far they have seqnos, at one moment."""

    visibility: PinnedVisibility
    numbered: SequencerState

    @classmethod
    def of(cls, followed: FollowedTopic) -> NumberedLog:
        """Copy what the service knows, so that another thread can use it."""
        return cls(PinnedVisibility.copy_of(followed.buffer), followed.numbered.snapshot_state())

    @classmethod
    def load(cls, broker: Broker, topic: str) -> NumberedLog | None:
        """Read a topic of another shard; None if it has had no transactions. Raises what reading the log raises."""
        loaded = load(broker, topic)
        if not loaded.registered:
            return None
        with SequencedFollower(
            broker, topic, loaded.buffer, loaded.resume, decided_after=loaded.sequenced, sequencer=loaded.sequencer
        ) as log:
            log.replay()
            log.sequence_all()
        return cls(PinnedVisibility.of(loaded.buffer), loaded.sequencer.snapshot_state())


def records_after(broker: Broker, topic: str, position: Position | None, known: NumberedLog | None) -> int:
    """The number of visible records after a position, of all if it is None; `known` is None without transactions.

    Reads no more than the rest of one ledger, or `MOST_READ` records of a topic without transactions. Raises what
    reading the log raises.
    """
    ledgers = broker.ledgers(topic)
    if position is not None and ledgers and position.ledger < ledgers[0].ledger:  # what follows it was trimmed, too
        position = None
    if known is None:
        return _count_everything(broker, topic, ledgers, EARLIEST if position is None else position)
    if known.numbered.position is None:
        return 0
    numbered = Sequencer.restore(known.numbered)
    if position is None:
        return numbered.next_seqno - numbered.oldest(ledgers[0].ledger if ledgers else 0)
    later = [(ledger, seqno) for ledger, seqno in numbered.first_seqnos.items() if ledger > position.ledger]
    ledger, seqno = min(later, default=(0, numbered.next_seqno))
    end = before_ledger(ledger) if later else known.numbered.position
    return (
        numbered.next_seqno - seqno + sum(count for _, count in _counts(broker, topic, position, end, known.visibility))
    )


def _count_everything(broker: Broker, topic: str, ledgers: list[Ledger], after: Position) -> int:
    """The number of records after a position: ledgers alone don't tell how many share an entry."""
    found, end = 0, broker.last_position(topic)
    for read, count in _counts(broker, topic, after, end, EVERYTHING):
        found += count
        if found >= MOST_READ:
            return found + messages_up_to(ledgers, end) - messages_up_to(ledgers, read.last)
    return found


def _counts(
    broker: Broker, topic: str, after: Position, end: Position | None, visibility: PinnedVisibility
) -> Iterator[tuple[Positions, int]]:
    """The messages after a position up to another one, in parts: their positions, and how many visible records."""
    begin = after
    if after.batch != NO_INDEX:  # a record of a set, of which the rest counts, or of a batch that shares an entry
        begin = Position(after.ledger, after.entry - 1)
    next_entry = Position(after.ledger, after.entry + 1)
    for placed in read_existing(broker, topic, begin, end, timeout=READ_TIMEOUT):
        same = placed.positions.search(next_entry)
        records = visible_records(placed.take(slice(same)), visibility)
        count = len(records) - records.positions.search(after, right=True)
        yield placed.positions, count + int(visible_counts(placed.take(slice(same, None)), visibility).sum())
