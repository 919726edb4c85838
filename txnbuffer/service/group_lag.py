"""The lag of consumer groups: how many committed records of a topic follow the position of a group

Markers and records of aborted transactions do not count. Records of open transactions count once they are committed
and all before them is decided, because the group can't read them earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker_io.port import Broker, Ledger, messages_up_to
from broker_io.position import NO_INDEX, Position, before_ledger
from txnbuffer.buffer.visibility import PinnedVisibility, Sequencer, SequencerState, visible_counts
from txnbuffer.follow import SequencedFollower, read_existing, visible_records
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.restore import load

READ_TIMEOUT = 5.0
"""Seconds within which the next messages of a topic must be read."""


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

    Reads no more than the rest of one ledger. Raises what reading the log raises.
    """
    ledgers = broker.ledgers(topic)
    if known is None:
        return messages_up_to(ledgers, broker.last_position(topic)) - messages_up_to(ledgers, position)
    if known.numbered.position is None:
        return 0
    numbered = Sequencer.restore(known.numbered)
    if position is None or _is_trimmed(position, ledgers):
        return numbered.next_seqno - numbered.oldest(ledgers[0].ledger if ledgers else 0)
    later = [(ledger, seqno) for ledger, seqno in numbered.first_seqnos.items() if ledger > position.ledger]
    ledger, seqno = min(later, default=(0, numbered.next_seqno))
    end = before_ledger(ledger) if later else known.numbered.position
    return numbered.next_seqno - seqno + _count(broker, topic, position, end, known.visibility)


def _is_trimmed(position: Position, ledgers: list[Ledger]) -> bool:
    return bool(ledgers) and position.ledger < ledgers[0].ledger


def _count(broker: Broker, topic: str, after: Position, end: Position, visibility: PinnedVisibility) -> int:
    """The number of visible records after a position up to another one."""
    begin, count = after, 0
    if after.batch != NO_INDEX:  # a record of a set, of which the rest counts
        begin = Position(after.ledger, after.entry - 1)
    for placed in read_existing(broker, topic, begin, end, timeout=READ_TIMEOUT):
        if begin != after:
            begin, same = after, placed.positions.search(Position(after.ledger, after.entry), right=True)
            records = visible_records(placed.take(slice(same)), visibility)
            count += len(records) - records.positions.search(after, right=True)
            placed = placed.take(slice(same, None))
        count += int(visible_counts(placed, visibility).sum())
    return count
