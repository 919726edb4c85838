"""One topic of a reader: its visible records, or all records, in log order

A follower reads one topic, from any position: visible records in log order, with their seqnos. The log is applied from
the position of the snapshot on, which may be after the position where reading starts: what is before it is read from
the log a second time, by the visibility of the buffer.
"""

from __future__ import annotations

from typing import NamedTuple

from broker_io.batch import PlacedBatch
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker
from broker_io.position import NO_INDEX
from snapshots.errors import SnapshotMissing
from snapshots.format import reaches
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.buffer.visibility import reader_floor
from txnbuffer.client.reading.records import RecordBatch
from txnbuffer.client.reading.starts import StartPoint
from txnbuffer.client.serializers import Deserializer
from txnbuffer.errors import InvalidRequest, ProtocolStopped, ReplayStalled
from txnbuffer.follow import LogFollower, RecordFollower, VisibleRecords, held_back, unpacked
from txnbuffer.model import EARLIEST, Position
from txnbuffer.protocol import any_transactional
from txnbuffer.recordset import TOGETHER, rows_within, without_content
from txnbuffer.recovery.restore import LOST, LoadedTopic, load

MAX_WAIT = 10.0
"""Seconds to wait for a message that was already read once."""

ATTEMPTS = 5
"""How many times a reader starts, if the log is trimmed between loading the snapshot and opening the log."""

MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Approximate bytes of undecided messages kept in memory for a topic; beyond it they are read from the log again."""


class Reach(NamedTuple):
    """How far a topic was read, where it has nothing to return.

    - `at`: all messages up to here were read.
    - `first_open`: the first record of the oldest open transaction, from which on nothing is returned.
    - `backlog`: messages before it have still to be read from the log a second time.
    - `next_seqno`: that of the next visible record; None if it is unknown.
    """

    at: Position
    first_open: Position | None
    backlog: bool
    next_seqno: int | None


class CommittedFollower:
    """One topic of a reader: its committed records in log order, each with its seqno.

    `first_seqno`: that of the first visible record of the log where the log was opened, which is at or before the
    start; None if unknown.
    """

    def __init__(self, broker: Broker, topic: str, start: StartPoint, deserializer: Deserializer | None = None) -> None:
        self.topic = topic
        self._broker = broker
        self._deserializer = deserializer
        self._start = start
        self.first_seqno: int | None = None
        self._attempts = ATTEMPTS - 1
        self._opened = False
        self._delivered = False
        self._stopped: Error | None = None
        self._blocked = False
        self._rest: RecordBatch | None = None
        self._unapplied: PlacedBatch | None = None
        self._open()

    def _open(self) -> None:
        """Load the snapshot and open the log; retry while attempts are left if the log was trimmed in between."""
        while True:
            loaded = load(self._broker, self.topic)
            self._registered = loaded.registered
            self._first_ledger = loaded.first_ledger
            seqno, self._at = loaded.anchor(self._start.position)
            if not loaded.registered:
                self._at = loaded.resume
            try:
                self._check_start()
                if self._start.seqno:
                    seqno, self._at = self._place_of(self._start.seqno, loaded)
                self._log = self._follow(loaded)
            except PositionTrimmed:
                if not self._attempts:
                    raise
                self._attempts -= 1
            else:
                self._log.next_seqno = self.first_seqno = seqno
                self._opened = True
                return

    def _follow(self, loaded: LoadedTopic) -> RecordFollower:
        log = RecordFollower(self._broker, self.topic, loaded.buffer, loaded.resume, decided_after=self._at)
        log.open()
        log.held_limit = MAX_BUFFERED_BYTES
        return log

    def _check_start(self) -> None:
        """Raises PositionTrimmed if records after the start were trimmed: continuing would skip them."""
        start = self._start.position
        if start > EARLIEST and start.ledger < self._first_ledger:
            with self._broker.reader(self.topic, start._replace(batch=NO_INDEX)) as reader:
                reader.read(limit=1)

    def _place_of(self, seqno: int, loaded: LoadedTopic) -> tuple[int, Position]:
        """The nearest known place at or before a seqno, as `anchor`. Raises InvalidRequest, PositionTrimmed."""
        known = loaded.known_seqnos()
        if not known:
            raise InvalidRequest(f"topic {self.topic!r} has no seqnos yet: start at a position or at a time")
        usable = [(first, at) for at, first in known if first <= seqno]
        if not usable:
            first = min(first for _, first in known)
            raise PositionTrimmed(
                f"topic {self.topic} begins at seqno {first}: seqno {seqno} was trimmed; start at the beginning"
            )
        return max(usable)

    @property
    def next_position(self) -> Position:
        """The last position that was delivered; delivery continues after it."""
        return self._at if self._delivered else max(self._at, self._start.before)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The newest epoch of each coordinator whose markers were read."""
        return tuple(state.epoch for state in self._log.buffer.coordinators.values())

    @property
    def decided_position(self) -> Position:
        """The position up to which all visible records can be returned."""
        return self._log.buffer.max_read_position or EARLIEST

    def held_back(self) -> HeldBack | None:
        """Return what an open transaction holds back, of what was read."""
        buffer = self._log.buffer
        oldest = None if buffer.replaying else buffer.ongoing.oldest()
        return None if oldest is None else held_back(self._broker, self.topic, oldest, buffer.applied)

    def reach(self) -> Reach:
        """Return how far the topic was read."""
        log = self._log
        oldest = log.buffer.ongoing.oldest()
        waiting = not self._opened or log.buffer.replaying or log.has_backlog or self._unapplied is not None
        return Reach(log.at, None if oldest is None else oldest.first, waiting, log.next_seqno)

    def poll(self, limit: int) -> RecordBatch | None:
        """Return 1 to `limit` visible records without waiting; None if there are none."""
        while self._rest is None:
            visible = self._next_visible(limit) if self._opened and not self._blocked else None
            if visible is not None:
                self._take(visible)
            elif self._stopped is not None:
                raise self._stopped.with_traceback(None)
            else:
                return None
        self._rest.prepare()
        records, self._rest = self._rest, None
        if len(records) > limit:
            self._rest = records.take(slice(limit, None))
            records = records.take(slice(limit))
        return records

    def advance(self, timeout: float) -> bool:
        """Read more of the log, waiting up to `timeout` seconds; return whether there was more."""
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
        self._unapplied = None
        if not self._registered and any_transactional(placed.messages):
            try:
                if not self._learn_state():
                    return True  # the messages are read again
            except Error as error:
                if error.retryable:
                    self._unapplied = placed  # the next read retries it
                    raise
                self._stopped, self._blocked = error, True
                return True
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

    def _take(self, visible: VisibleRecords) -> None:
        """Keep the records after the start for `poll`. A record set that cannot be unpacked stops the topic."""
        records, seqnos, last, broken = visible
        self._delivered = True
        if broken is None:
            self._at = last
        else:
            self._stopped, self._blocked = broken, True
            self._at = records.positions.last if len(records) else self._at
        first = self._start.first_of(records, seqnos)
        if len(records) > first:
            self._rest = RecordBatch.of(self.topic, records, seqnos, self._deserializer).take(slice(first, None))
            self._start = StartPoint(EARLIEST)

    def _learn_state(self) -> bool:
        """Load the state of a topic whose first transactions appear; return whether the log continues as it was read.

        A topic gets its first snapshot before its first transaction. If it had transactions before, its snapshot was
        not found when the reader started, and has more than this buffer. Raises SnapshotMissing if there is none, and
        the errors of reading the snapshot and the log.
        """
        loaded = load(self._broker, self.topic)
        if not loaded.registered:
            raise SnapshotMissing(self.topic, LOST)
        log = self._log
        continues = reaches(log.at, loaded.resume)
        if continues:
            with LogFollower(self._broker, self.topic, loaded.buffer, loaded.resume) as newest:
                newest.replay(log.at, exactly=True, timeout=MAX_WAIT)
            log.buffer = loaded.buffer
        else:
            log = self._follow(loaded)
        seqno, at = loaded.anchor(Position(self._at.ledger, self._at.entry + 1))
        if seqno is not None:
            try:
                seqno += log.count_visible(at, self._at, timeout=MAX_WAIT)
            except Error:
                if not continues:  # the next read begins with the log as it was
                    log.close()
                raise
        if not continues:
            self._log.close()
        self._log, log.next_seqno = log, seqno
        self._registered = True
        return continues

    def _next_visible(self, limit: int) -> VisibleRecords | None:
        while True:
            try:
                return self._log.take_visible(limit)
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
            self._log.buffer = loaded.buffer


class UncommittedFollower:
    """One topic of a read_uncommitted reader: all records of the log, also of open and aborted transactions.

    Its methods do what those of CommittedFollower do.
    """

    first_seqno: int | None = None

    def __init__(self, broker: Broker, topic: str, start: StartPoint, deserializer: Deserializer | None = None) -> None:
        if start.seqno:
            raise InvalidRequest("a read_uncommitted reader has no seqnos: start at a position or at a time")
        self.topic = topic
        self._deserializer = deserializer
        self._start = start
        self._stopped: Error | None = None
        # A start inside a record set is inside its message.
        first = start.position
        self._reader = broker.reader(topic, first if first == EARLIEST else first._replace(batch=NO_INDEX))
        self._messages: PlacedBatch | None = None
        self._records: PlacedBatch | None = None
        self._at = self._read_to = start.before

    @property
    def next_position(self) -> Position:
        return self._at

    @property
    def decided_position(self) -> Position:
        return self._read_to

    @property
    def epochs(self) -> tuple[int, ...]:
        return ()

    def held_back(self) -> HeldBack | None:
        return None

    def reach(self) -> Reach:
        return Reach(self._read_to, None, self._messages is not None, None)

    def poll(self, limit: int) -> RecordBatch | None:
        if self._records is None:
            if self._stopped is not None:
                raise self._stopped.with_traceback(None)
            return None
        batch, rest = self._records.take(slice(limit)), self._records.take(slice(limit, None))
        found = RecordBatch.of(self.topic, batch, None, self._deserializer)
        found.prepare()
        self._records = rest if len(rest) else None
        over = self._records is None and self._messages is None and self._stopped is None
        self._at = self._read_to if over else batch.positions.last
        return found

    def advance(self, timeout: float) -> bool:
        if self._stopped is not None or self._records is not None:
            return False
        if self._messages is None:
            placed = self._reader.read(timeout=timeout)
            if placed is None:
                return False
            self._read_to = placed.positions.last
            self._messages = placed.take(~without_content(placed))
        self._unpack(self._messages)
        return True

    def _unpack(self, messages: PlacedBatch) -> None:
        """Unpack the next messages into records, and keep the remaining messages."""
        count = rows_within(messages, TOGETHER)
        self._messages = messages.take(slice(count, None)) if count < len(messages) else None
        records, self._stopped = unpacked(messages.take(slice(count)))
        records = records.take(slice(self._start.first_of(records), None))
        if len(records):
            self._records, self._start = records, StartPoint(EARLIEST)
        elif self._stopped is None and self._messages is None:
            self._at = self._read_to

    def close(self) -> None:
        self._reader.close()
