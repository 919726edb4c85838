"""Reading one topic for a committed reader, from any position: visible records in log order, with their seqnos

The log is applied from the position of the snapshot on, which may be after the position where reading starts: what is
before it is read from the log a second time, by the visibility of the buffer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker
from broker_io.position import NO_INDEX, Int64s
from snapshots.errors import SnapshotMissing
from snapshots.records import reaches
from txnbuffer.buffer import reader_floor
from txnbuffer.buffer.visibility import visible_counts, visible_mask
from txnbuffer.client.records import RecordBatch
from txnbuffer.errors import ProtocolStopped, ReplayStalled, UndecodableRecordSet
from txnbuffer.follow.follower import LogFollower
from txnbuffer.model import EARLIEST, Position
from txnbuffer.protocol import any_transactional
from txnbuffer.recordset import expand
from txnbuffer.recovery.load import LoadedTopic, load
from txnbuffer.recovery.restore import LOST

MAX_WAIT = 10.0
"""Seconds to wait for a message that was already read once."""

ATTEMPTS = 5
"""How many times a reader starts, if the log is trimmed between loading the snapshot and opening the log."""

MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Approximate bytes of undecided messages kept in memory for a topic; beyond it they are read from the log again."""


class StartPoint(NamedTuple):
    """The first record to read: at or after `position`, published at or after `not_before` (milliseconds)."""

    position: Position
    not_before: int = 0

    @property
    def before(self) -> Position:
        """The position just before the start."""
        start = self.position
        return start if start == EARLIEST else Position(start.ledger, start.entry - 1)

    def first_of(self, records: PlacedBatch) -> int:
        """Return the row of the first record to read, or the number of rows if there is none."""
        first = records.positions.search(self.position)
        if self.not_before:
            rows = np.flatnonzero(records.publish_times[first:] >= self.not_before)
            first = first + int(rows[0]) if len(rows) else len(records)
        return first


class TopicFollower(Protocol):
    """The interface of one topic of a reader."""

    topic: str

    @property
    def epochs(self) -> tuple[int, ...]:
        """The newest epoch of each coordinator whose markers were read."""

    def poll(self, limit: int) -> RecordBatch | None:
        """Return 1 to `limit` visible records without waiting; None if there are none."""

    def advance(self, timeout: float) -> bool:
        """Read more of the log, waiting up to `timeout` seconds; return whether there was more."""

    @property
    def next_position(self) -> Position:
        """The last position that was delivered; delivery continues after it."""

    @property
    def decided_position(self) -> Position:
        """The position up to which all visible records can be returned."""

    def close(self) -> None: ...


class CommittedFollower:
    """Returns committed records in log order, each with its seqno."""

    def __init__(self, broker: Broker, topic: str, start: StartPoint) -> None:
        self.topic = topic
        self._broker = broker
        self._start = start
        self._attempts = ATTEMPTS - 1
        self._opened = False
        self._delivered = False
        self._stopped: Error | None = None
        self._blocked = False
        self._rest: tuple[PlacedBatch, Int64s | None] | None = None
        self._unapplied: PlacedBatch | None = None
        self._open()

    def _open(self) -> None:
        """Load the snapshot and open the log; retry while attempts are left if the log was trimmed in between."""
        while True:
            loaded = load(self._broker, self.topic)
            self._registered = loaded.registered
            self._first_ledger = loaded.first_ledger
            self._seqno, self._at = loaded.anchor(self._start.position)
            if not loaded.registered:
                self._at = loaded.resume
            try:
                self._check_start()
                self._log = self._follow(loaded)
            except PositionTrimmed:
                if not self._attempts:
                    raise
                self._attempts -= 1
            else:
                self._opened = True
                return

    def _follow(self, loaded: LoadedTopic) -> LogFollower:
        reader = self._broker.reader(self.topic, loaded.resume, inclusive=False)
        log = LogFollower(self._broker, self.topic, loaded.buffer, loaded.resume, decided_after=self._at, reader=reader)
        log.limit_held(MAX_BUFFERED_BYTES)
        return log

    def _check_start(self) -> None:
        """Raises PositionTrimmed if records after the start were trimmed: continuing would skip them."""
        start = self._start.position
        if start > EARLIEST and start.ledger < self._first_ledger:
            with self._broker.reader(self.topic, start._replace(batch=NO_INDEX)) as reader:
                reader.read(limit=1)

    @property
    def next_position(self) -> Position:
        return self._at if self._delivered else max(self._at, self._start.before)

    @property
    def epochs(self) -> tuple[int, ...]:
        return tuple(state.epoch for state in self._log.buffer.coordinators.values())

    @property
    def decided_position(self) -> Position:
        return self._log.buffer.max_read_position or EARLIEST

    def poll(self, limit: int) -> RecordBatch | None:
        while self._rest is None:
            decided = self._next_decided(limit) if self._opened and not self._blocked else None
            if decided is not None:
                self._take(decided)
            elif self._stopped is not None:
                raise self._stopped
            else:
                return None
        records, seqnos = self._rest
        self._rest = None
        if len(records) > limit:
            rest = slice(limit, None)
            self._rest = records.take(rest), None if seqnos is None else seqnos[rest]
            records, seqnos = records.take(slice(limit)), None if seqnos is None else seqnos[:limit]
        return RecordBatch.of(self.topic, records, seqnos)

    def advance(self, timeout: float) -> bool:
        if not self._opened:
            self._open()
            return True
        try:
            placed = None if self._stopped is not None else self._unapplied or self._log.fetch(timeout)
        except PositionTrimmed as error:
            self._restart(error)
            return True
        if placed is None:
            return False
        if not self._registered and any_transactional(placed.messages):
            try:
                self._learn_seqno()
            except Error as error:
                if error.retryable:
                    self._unapplied = placed  # the next read retries it
                    raise
                self._stopped, self._blocked = error, True
                return True
        self._unapplied = None
        try:
            self._log.apply(placed)
        except ProtocolStopped as error:
            self._stopped = error
        if placed.positions.first.ledger > self._first_ledger:
            self._forget_trimmed()
        return True

    def close(self) -> None:
        self._log.close()

    def _restart(self, error: PositionTrimmed) -> None:
        """Restart at the new beginning of the log, if no record was delivered yet. Raises `error` otherwise."""
        if self._delivered or not self._attempts:
            raise error
        self._attempts -= 1
        self.close()
        self._opened = False  # if this fails, the next read retries it
        self._open()

    def _take(self, decided: PlacedBatch) -> None:
        """Assign seqnos to the visible records of decided messages, and keep those after the start for `poll`."""
        self._delivered = True
        visible = self._visible(decided)
        if not self._blocked:
            self._at = decided.positions.last
        elif len(visible):
            self._at = visible.positions.last
        seqnos: Int64s | None = None
        if self._seqno is not None:
            seqnos = np.arange(self._seqno, self._seqno + len(visible), dtype=np.int64)
            self._seqno += len(visible)
        wanted = slice(self._start.first_of(visible), None)
        if len(visible) > wanted.start:
            self._rest = visible.take(wanted), None if seqnos is None else seqnos[wanted]
            self._start = StartPoint(EARLIEST)

    def _visible(self, decided: PlacedBatch) -> PlacedBatch:
        """Return the visible records. A record set that cannot be unpacked stops the topic; return those before it."""
        buffer = self._log.buffer
        messages = decided.take(visible_mask(decided, buffer))
        records, broken = unpacked(messages)
        if broken is not None:
            self._stopped, self._blocked = broken, True
        if records is messages:
            return messages
        return records.take(~buffer.suppressed.mask(records.positions))

    def _learn_seqno(self) -> None:
        """Find the next seqno when the first transactions of a topic appear.

        A topic gets its first snapshot before its first transaction. Raises SnapshotMissing if there is none, and the
        errors of reading the snapshot and the log.
        """
        loaded = load(self._broker, self.topic)
        if not loaded.registered:
            raise SnapshotMissing(self.topic, LOST)
        seqno, at = loaded.anchor(Position(self._at.ledger, self._at.entry + 1))
        with self._broker.reader(self.topic, at, inclusive=False) as reader:
            while seqno is not None and at < self._at and not reaches(at, self._at):
                placed = reader.read(timeout=MAX_WAIT)
                if placed is None:
                    raise ReplayStalled(
                        f"topic {self.topic!r}: no message after {at}, although {self._at} was read: try again"
                    )
                passed = placed.take(slice(placed.positions.search(self._at, right=True)))
                seqno += int(visible_counts(passed, self._log.buffer).sum())
                at = placed.positions.last
        self._registered, self._seqno = True, seqno

    def _next_decided(self, limit: int) -> PlacedBatch | None:
        """Return the next messages, all of them decided, with markers and invisible records."""
        while True:
            try:
                return self._log.take(limit)
            except PositionTrimmed as error:
                self._restart(error)

    def _forget_trimmed(self) -> None:
        """Drop aborts whose ledgers were trimmed: replace the buffer by one loaded from the newest snapshot.

        A sealed segment keeps no ids in memory, and the owner may have deleted its entry, so the aborts cannot be
        removed one by one. Do nothing while the next record to deliver is in a trimmed ledger.
        """
        self._first_ledger = self._broker.ledgers(self.topic)[0].ledger
        floor = reader_floor(self._first_ledger, self._at)
        parts = self._log.buffer.segments.summaries
        if not parts or parts[0].last_ledger >= floor or floor < self._first_ledger:
            return
        loaded = load(self._broker, self.topic)
        target = self._log.buffer.applied
        with LogFollower(self._broker, self.topic, loaded.buffer, loaded.resume) as newest:
            try:
                newest.replay(target, exactly=True, timeout=MAX_WAIT)
            except ReplayStalled:
                return
        if loaded.buffer.applied == target:
            self._log.replace_buffer(loaded.buffer)


def unpacked(messages: PlacedBatch) -> tuple[PlacedBatch, Error | None]:
    """Return the records of messages up to the first invalid record set, and the error of that one."""
    try:
        return expand(messages), None
    except UndecodableRecordSet as error:
        for row in range(len(messages)):
            try:
                expand(messages.take(slice(row, row + 1)))
            except UndecodableRecordSet:
                return expand(messages.take(slice(row))), error
        raise
