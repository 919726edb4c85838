"""The one way to read the log of a topic: replayed into its buffer, decided in order, sequenced, unpacked to records

`LogFollower` is the only code that replays a log into a transaction buffer and detects its end. A log is replayed up to
an end that was taken before: messages up to it exist, so a reader that returns none has not reached the end, and to
give up is an error. After the replay the follower applies what its reader or its caller gives it. An owner on the
embedded log passes on the messages that it appended, with their columns.

`DecidedFollower` holds applied messages in memory until they are decided. If too many are held, they are dropped, and
read from the log again once they are decided. Reading again stops when it has caught up with the applied messages.

`visible_records` are the records of decided messages: record sets unpacked, suppressed records left out. Those that
compaction has emptied are among them, because they keep their seqnos; they are left out last (`removed_rows`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import READ_SECONDS, Broker, Reader, Resource, messages_after
from broker_io.position import NO_INDEX, Int64s, Position
from snapshots.format import reaches
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.buffer.state import Effect, OpenTxn
from txnbuffer.buffer.visibility import Sequenced, Sequencer, Visibility, decided_rows, end_of, visible_counts
from txnbuffer.errors import ProtocolStopped, ReplayStalled, SeqnoGap, UndecodableRecordSet
from txnbuffer.progress import ProgressReporter, is_reported, report
from txnbuffer.protocol import removed_rows
from txnbuffer.recordset import expand, rows_within

OnSequenced = Callable[[PlacedBatch, Sequenced], None]


class LogFollower(Resource):
    """Applies the log of a topic after `resume` to its buffer, which was restored up to there.

    The reader opens when it is needed, or by `open`. `keeps_sealed`: the caller takes the segments that the buffer
    seals, else they are dropped.
    """

    def __init__(self, broker: Broker, topic: str, buffer: TransactionBuffer, resume: Position) -> None:
        self.topic = topic
        self.buffer = buffer
        self.keeps_sealed = False
        self._broker = broker
        self._resume = resume
        self._reader: Reader | None = None

    @property
    def at(self) -> Position:
        """The position after which to continue reading: everything up to it is applied."""
        applied = self.buffer.applied
        return self._resume if applied is None else max(applied, self._resume)

    def read(self, timeout: float = 0.0) -> list[Effect] | None:
        """Apply the next messages; return their effects, or None if none came in `timeout` seconds.

        Raises ProtocolStopped, PositionTrimmed, Damaged: then the topic can't be followed any further.
        """
        placed = self.fetch(timeout)
        return None if placed is None else self.apply(placed)

    def fetch(self, timeout: float = 0.0) -> PlacedBatch | None:
        """Return the next messages, which the caller then applies; None if none came. Raises as `read`."""
        return self.open().read(timeout=timeout)

    def apply(self, placed: PlacedBatch) -> list[Effect]:
        """Apply messages that follow the applied ones. Raises ProtocolStopped, which names the topic."""
        try:
            effects = self.buffer.apply_batch(placed)
        except ProtocolStopped as error:
            self._applied(placed.take(slice(placed.positions.search(error.position))))
            raise error.of_topic(self.topic) from None
        self._applied(placed)
        if not self.keeps_sealed:
            self.buffer.segments.take_sealed()
        return effects

    def replay(
        self, end: Position | None = None, *, exactly: bool = False, timeout: float | None = None
    ) -> list[Effect]:
        """Apply everything up to `end`, by default the present end of the log; nothing is visible before.

        `exactly`: apply nothing that is after it. Raises as `read`, and ReplayStalled if a message before the end does
        not come within `timeout` seconds (None: `READ_SECONDS`).
        """
        timeout = READ_SECONDS if timeout is None else timeout
        end = self._broker.last_position(self.topic) if end is None else end
        effects: list[Effect] = []
        if end is None or reaches(self.at, end):
            return effects
        self.buffer.replay_until(end)
        with reading(self._broker, self.topic, self.at, end) as progress:
            while not reaches(self.at, end):
                if (placed := self.fetch(timeout)) is None:
                    raise stalled(self.topic, end, self.at, timeout)
                within = placed.positions.search(end, right=True) if exactly else len(placed)
                effects += self.apply(placed.take(slice(within)))
                progress.advance(within)
                if within < len(placed):
                    self._close_reader()  # another one reads the rest again
                    break
        return effects

    def take_reader(self) -> Reader | None:
        """Hand over the reader, if it is open; it continues after `at`. The caller passes messages to `apply` now."""
        reader, self._reader = self._reader, None
        return reader

    def return_reader(self, reader: Reader | None) -> None:
        """Continue with a reader that was handed over and has returned all that was applied since."""
        self._close_reader()
        self._reader = reader

    def close(self) -> None:
        self._close_reader()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def open(self) -> Reader:
        """The reader, which continues after `at`."""
        if self._reader is None:
            self._reader = self._broker.reader(self.topic, self.at, inclusive=False)
        return self._reader

    def _applied(self, placed: PlacedBatch) -> None:
        """Messages were applied."""


HELD_BYTES = 8 * 1024 * 1024
"""Approximate limit on the bytes of a topic's undecided messages in memory."""
STEP_MESSAGES = 4096
"""Approximate limit on the messages that one step reads again, unless the caller takes more at once."""


class DecidedFollower(LogFollower):
    """Follows a log, and returns its messages once they are decided.

    `taken`: the last message that was taken, at first where to begin, at or before `resume`. `held_limit`: approximate
    limit on the bytes of undecided messages in memory. `lagging`: messages are read from the log again.
    """

    def __init__(
        self, broker: Broker, topic: str, buffer: TransactionBuffer, resume: Position, *, decided_after: Position
    ) -> None:
        super().__init__(broker, topic, buffer, resume)
        self.taken = decided_after
        self.held_limit = HELD_BYTES
        self.lagging = not reaches(decided_after, resume)
        self._held: deque[PlacedBatch] = deque()
        self._held_bytes = 0
        self._read_to = decided_after
        self._again: Reader | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether decided messages have to be read from the log again."""
        return self.lagging and not reaches(self._read_to, self.buffer.max_read_position)

    def take(self, limit: int | None = None) -> PlacedBatch | None:
        """The next decided messages, with at most about `limit` records; None if no more are decided.

        Raises what reading the log raises, PositionTrimmed among it.
        """
        while True:
            if (taken := self._from_held(limit)) is not None or not self.lagging:
                return taken
            if not self._read(limit):
                return None

    def close(self) -> None:
        super().close()
        self._close_again()

    def _close_again(self) -> None:
        if self._again is not None:
            self._again.close()
            self._again = None

    def _applied(self, placed: PlacedBatch) -> None:
        if not self.lagging and len(placed.publish_times):
            self._hold(placed)
        if self._held_bytes > self.held_limit:
            self._take_decided()
        if self._held_bytes > self.held_limit:  # drop the undecided rest, which is read from the log again
            self._held.clear()
            self._held_bytes = 0
            self._read_to = self.taken
            self.lagging = True
            self._close_again()

    def _take_decided(self) -> None:
        """Take the decided messages, if that can be done at once."""

    def _from_held(self, limit: int | None) -> PlacedBatch | None:
        if not self._held:
            return None
        head = self._held[0]
        count = decided_rows(head, self.buffer)
        if limit is not None and count:
            count = min(count, rows_within(head, limit))
        if not count:
            return None
        taken = self._held.popleft()
        if count < len(head.publish_times):
            taken = head.take(slice(count))
            self._held.appendleft(head.take(slice(count, None)))
        self._held_bytes -= taken.messages.weight
        self.taken = end_of(taken.positions.last, self.buffer.max_read_position)
        return taken

    def _hold(self, placed: PlacedBatch) -> None:
        self._held.append(placed)
        self._held_bytes += placed.messages.weight

    def _read(self, limit: int | None) -> bool:
        """Read on while more is decided; return whether anything was read. Stop lagging once all applied is read."""
        applied = self.buffer.applied
        if applied is None or reaches(self._read_to, applied):
            self._caught_up()
            return False
        if reaches(self._read_to, self.buffer.max_read_position):
            return False
        if self._again is None:
            self._again = self._broker.reader(self.topic, self._read_to, inclusive=False)
        try:
            placed = self._again.read(limit=max(limit or 0, STEP_MESSAGES))
        except Error:
            self._close_again()  # the next attempt opens another reader
            raise
        if placed is None:
            return False
        known = placed.take(slice(placed.positions.search(applied, right=True)))
        if len(known):
            self._hold(known)
            self._read_to = end_of(known.positions.last, applied)
        if len(known) < len(placed) or reaches(self._read_to, applied):
            self._caught_up()
        return True

    def _caught_up(self) -> None:
        """All applied messages were read: the next ones are held when they are applied."""
        self.lagging = False
        self._close_again()


class SequencedFollower(DecidedFollower):
    """Follows a log whose decided messages `numbered` numbers, which has numbered those up to `decided_after`.

    `on_sequenced` is called with them.
    """

    def __init__(
        self,
        broker: Broker,
        topic: str,
        buffer: TransactionBuffer,
        resume: Position,
        *,
        decided_after: Position,
        sequencer: Sequencer,
    ) -> None:
        super().__init__(broker, topic, buffer, resume, decided_after=decided_after)
        self.numbered = sequencer
        self.on_sequenced: OnSequenced | None = None

    def sequence(self) -> bool:
        """Number one batch of decided messages; return False if no more are decided."""
        placed = self.take()
        if placed is None:
            return False
        sequenced = self.numbered.advance(placed, self.buffer, decided=True)
        if self.on_sequenced is not None and sequenced.stop > sequenced.start:
            self.on_sequenced(placed, sequenced)
        return True

    def sequence_held(self) -> None:
        """Number the decided messages in memory; if they have to be read from the log again, one batch of them."""
        while (self._held or self.lagging) and self.sequence() and not self.lagging:
            pass

    def sequence_all(self) -> None:
        """Number all messages that are decided by now."""
        while self.sequence():
            pass

    def continued_in(self, ledger: int) -> None:
        """The log continues in this ledger after all applied messages; once these are numbered, number from there.

        Then the ledger before may be trimmed, however long later messages stay undecided.
        """
        if self.numbered.position is not None and reaches(self.taken, self.buffer.applied):
            self.taken = self._read_to = max(self.taken, Position(ledger, -1))
            self.numbered.position = self.taken

    def _take_decided(self) -> None:
        self.sequence_all()


class VisibleRecords(NamedTuple):
    """The visible records of decided messages, of which `last` is the last one, without emptied ones.

    `seqnos`: int64[n], None if they are not known. `broken`: the error of the first record set that cannot be unpacked;
    these are the records before it.
    """

    records: PlacedBatch
    seqnos: Int64s | None
    last: Position
    broken: Error | None


def numbered_records(
    placed: PlacedBatch, visibility: Visibility, first: int
) -> tuple[PlacedBatch, Int64s, int, Error | None]:
    """The visible records of decided messages, without emptied ones, and their seqnos, `first` and following.

    Also how many seqnos the messages have, and the error of a record set as in `VisibleRecords`.
    """
    counts = visible_counts(placed, visibility)
    records, broken = visible_prefix(placed, visibility, counts)
    seqnos = np.arange(first, first + len(records), dtype=np.int64)
    removed = removed_rows(records.messages)
    if removed is not None:
        records, seqnos = records.take(~removed), seqnos[~removed]
    return records, seqnos, int(counts.sum()), broken


class RecordFollower(DecidedFollower):
    """Follows a log for a reader, which takes the visible records. `next_seqno`: of the next one; None if unknown."""

    next_seqno: int | None = None

    def take_visible(self, limit: int) -> VisibleRecords | None:
        """The visible records of the next decided messages, as `take`."""
        placed = self.take(limit)
        if placed is None:
            return None
        records, seqnos, count, broken = numbered_records(placed, self.buffer, self.next_seqno or 0)
        if self.next_seqno is None:
            return VisibleRecords(records, None, placed.positions.last, broken)
        self.next_seqno += count
        return VisibleRecords(records, seqnos, placed.positions.last, broken)

    def count_visible(self, after: Position, last: Position, *, timeout: float) -> int:
        """The number of visible records after a position up to another one, between which all is applied and decided.

        Raises as `read_existing`.
        """
        existing = read_existing(self._broker, self.topic, after, last, timeout=timeout)
        return sum(int(visible_counts(placed, self.buffer).sum()) for placed in existing)


PUBLISHED_TIMEOUT = 5.0
"""Seconds within which a message is read whose publish time is wanted."""


def held_back(
    broker: Broker, topic: str, oldest: OpenTxn, applied: Position | None, until: int | None = None
) -> HeldBack | None:
    """What the oldest open transaction of a topic holds back, of the messages up to `applied`; None if there are none.

    Raises what requests to the broker raise, unless that is retryable.
    """
    ledgers = broker.ledgers(topic)
    messages = messages_after(ledgers, oldest.first, applied)
    if not messages:
        return None
    since = None
    try:
        since = publish_time(broker, topic, oldest.first)
    except Error as error:
        if not error.retryable:
            raise
    return HeldBack(topic, messages, oldest.txn, oldest.first, since, until)


def publish_time(broker: Broker, topic: str, at: Position, timeout: float = PUBLISHED_TIMEOUT) -> int | None:
    """When the message at a position was published, in milliseconds since 1970; None if it is gone or does not come."""
    try:
        with broker.reader(topic, at._replace(batch=NO_INDEX)) as reader:
            placed = reader.read(limit=1, timeout=timeout)
    except PositionTrimmed:
        return None
    return None if placed is None or placed.positions.first[:2] != at[:2] else int(placed.publish_times[0])


def reading(broker: Broker, topic: str, after: Position, end: Position | None) -> ProgressReporter:
    """The progress of reading the messages of a topic after a position up to another one."""
    total = None
    if is_reported():  # else the ledgers, which a cluster has to be asked for, are not needed
        ledgers = broker.ledgers(topic)
        total = messages_after(ledgers, after, end)
    return report(f"reading {topic}", "messages", total)


def read_existing(
    broker: Broker, topic: str, after: Position, last: Position | None, *, timeout: float | None = None
) -> Iterator[PlacedBatch]:
    """The messages after a position up to `last`, the end of the log at some time; None: there are none.

    Raises as reading the log, and ReplayStalled if the next message does not come within `timeout` seconds (None:
    `READ_SECONDS`).
    """
    timeout = READ_SECONDS if timeout is None else timeout
    if last is None or reaches(after, last):
        return
    with reading(broker, topic, after, last) as progress, broker.reader(topic, after, inclusive=False) as reader:
        while not reaches(after, last):
            if (placed := reader.read(timeout=timeout)) is None:
                raise stalled(topic, last, after, timeout)
            after = placed.positions.last
            placed = placed.take(slice(placed.positions.search(last, right=True)))
            progress.advance(len(placed))
            yield placed


def stalled(topic: str, end: Position, at: Position, timeout: float) -> ReplayStalled:
    """The error of a topic whose messages up to `end` do not come."""
    return ReplayStalled(
        f"topic {topic}: the log goes up to {end}, but nothing came after {at} within {timeout:.0f} s: check the "
        "broker, and that the log does not end with native Pulsar transactions, and try again"
    )


def visible_records(placed: PlacedBatch, visibility: Visibility, counts: Int64s | None = None) -> PlacedBatch:
    """The visible records of messages, emptied ones included. `counts`: int64[n], how many each has, if that is known.

    Raises UndecodableRecordSet, and SeqnoGap if a record set contains another number of records than it declares.
    """
    if counts is None:
        counts = visible_counts(placed, visibility)
    records, broken = visible_prefix(placed, visibility, counts)
    if broken is not None:
        raise broken
    if len(records) != (expected := int(counts.sum())):
        raise SeqnoGap(f"{len(records)} records were read from {placed.positions.first} on, {expected} were expected")
    return records


def visible_prefix(placed: PlacedBatch, visibility: Visibility, counts: Int64s) -> tuple[PlacedBatch, Error | None]:
    """The visible records before the first record set that cannot be unpacked, and its error. `counts`: as above."""
    if not counts.all():
        placed = placed.take(np.flatnonzero(counts))
    records, broken = unpacked(placed)
    if records is not placed:
        records = records.take(~visibility.suppressed.mask(records.positions))
    return records, broken


def unpacked(placed: PlacedBatch) -> tuple[PlacedBatch, Error | None]:
    """The records of messages before the first record set that cannot be unpacked, and its error.

    Each record of a set has the transaction id and the sequence of its own.
    """
    try:
        return expand(placed), None
    except UndecodableRecordSet as error:
        for row in range(len(placed)):
            try:
                expand(placed.take(slice(row, row + 1)))
            except UndecodableRecordSet:
                return expand(placed.take(slice(row))), error
        raise
