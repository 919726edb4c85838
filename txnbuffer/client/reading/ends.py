"""Where readers end: the argument `until`, for one topic or partition

    "now"       the last record that is visible when the reader opens the topic
    Position    the record at this position, or the last one before it; without an index, all records of the message
    Seqno(n)    the record with this number
    datetime    the last record before the first message published at or after this time, as a start there has the rest

Until "now" nothing is applied that came later: what an open transaction holds back then is not read, and is said by
`held_back`. All others wait until each record up to there is visible or never will be.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock
from broker_io.port import READ_SECONDS, Broker, Reader, Resource
from broker_io.position import NO_INDEX
from snapshots.format import reaches
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.client.reading.followers import CommittedFollower, UncommittedFollower
from txnbuffer.client.reading.records import RecordBatch
from txnbuffer.client.reading.starts import Seqno, StartPoint, Until, milliseconds
from txnbuffer.client.serializers import Deserializer
from txnbuffer.errors import InvalidRequest
from txnbuffer.follow import RecordFollower, stalled
from txnbuffer.model import EARLIEST, Position
from txnbuffer.recovery.restore import LoadedTopic

SLICE = 0.01
"""Seconds before a reader asks again for messages that exist and did not come."""


def after(position: Position) -> Position:
    """The first position that is not read until this one."""
    if position.batch == NO_INDEX:
        return Position(position.ledger, position.entry + 1)
    return position._replace(batch=position.batch + 1)


def complete(at: Position, stop: Position, end: Position | None) -> bool:
    """Whether a reader that has read `at` has read all before `stop`, if the log ends with `end` or continues.

    A position with an index may be the last one of its message: only the end of the log, or a later message, says so.
    """
    return after(at) >= stop or (reaches(at, end) and Position(at.ledger, at.entry + 1) >= stop)


class UpTo(Resource):
    """A reader of a log that returns nothing after a position."""

    def __init__(self, reader: Reader, last: Position | None) -> None:
        self._reader = reader
        self._last = last
        self._over = last is None

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        placed = None if self._over else self._reader.read(limit=limit, timeout=timeout)
        if placed is None or self._last is None:
            return None
        within = placed.positions.search(self._last, right=True)
        self._over = within < len(placed)
        return placed.take(slice(within)) if within else None

    def close(self) -> None:
        self._reader.close()


class CommittedUntilNow(CommittedFollower):
    """A topic as it was when it was opened: no later message is applied. `end`: the last one of that moment.

    A log that is opened again before it has returned a record ends at the last message of then.
    """

    end: Position | None = None

    def _follow(self, loaded: LoadedTopic) -> RecordFollower:
        log = super()._follow(loaded)
        self.end = self._broker.last_position(self.topic)
        if (reader := log.take_reader()) is not None:
            log.return_reader(UpTo(reader, self.end))
        return log


class EndingFollower:
    """A follower that ends; `ended`: it has returned all records. Its other members do what those of a follower do."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        start: StartPoint,
        until: Until,
        deserializer: Deserializer | None,
        clock: Clock,
        *,
        committed: bool,
    ) -> None:
        """Raises as the followers, and InvalidRequest for a seqno where there are none."""
        self.topic = topic
        self.ended = False
        self._broker = broker
        self._clock = clock
        self._seqno = until.number if isinstance(until, Seqno) else 0
        self._due = milliseconds(until, "until") if isinstance(until, datetime) else None
        self._stop = after(until) if isinstance(until, Position) else None
        self._now = until == "now"
        self._waited = 0.0
        self._end: Position | None = None
        self._floor = EARLIEST  # all before it was trimmed
        self._follower: CommittedFollower | UncommittedFollower
        if not committed:
            self._follower = UncommittedFollower(broker, topic, start, deserializer)
        elif self._now:
            self._follower = CommittedUntilNow(broker, topic, start, deserializer)
        else:
            self._follower = CommittedFollower(broker, topic, start, deserializer)
        try:
            self._find_end()
        except BaseException:
            self._follower.close()
            raise

    def _find_end(self) -> None:
        if self._seqno and self._follower.first_seqno is None:
            raise InvalidRequest(f"topic {self.topic!r} has no seqnos here: read until a position or a time")
        self._end = self._broker.last_position(self.topic)
        if isinstance(self._follower, UncommittedFollower):
            self._floor = Position(self._broker.ledgers(self.topic)[0].ledger, -1)
        if self._due is not None:
            self._find_time(self._due)

    def _find_time(self, due: int) -> None:
        """Stop at the time, if a message was published since, or if none can be published before it any more."""
        passed = self._clock.now_ms() >= due
        end = self._broker.last_position(self.topic)
        found = self._broker.position_at(self.topic, due)
        if found is not None or passed:
            self._stop = found or (EARLIEST if end is None else after(end))
            self._due = None

    @property
    def first_seqno(self) -> int | None:
        return self._follower.first_seqno

    @property
    def next_position(self) -> Position:
        return self._follower.next_position

    @property
    def epochs(self) -> tuple[int, ...]:
        return self._follower.epochs

    @property
    def decided_position(self) -> Position:
        return self._follower.decided_position

    def held_back(self) -> HeldBack | None:
        return self._follower.held_back() if self._now or not self.ended else None

    def poll(self, limit: int) -> RecordBatch | None:
        batch = None if self.ended else self._follower.poll(limit)
        if batch is None:
            self.ended = self.ended or self._is_over()
            return None
        self._waited = 0.0
        rows = self._rows(batch)
        self.ended = rows < len(batch)
        return batch.take(slice(rows)) if rows else None

    def advance(self, timeout: float) -> bool:
        if self.ended:
            return False
        if self._due is not None:
            timeout = min(timeout, max(self._due - self._clock.now_ms(), 0) / 1000)
        began = self._clock.monotonic()
        if self._follower.advance(timeout):
            self._waited = 0.0
            return True
        if self._due is not None and self._clock.now_ms() >= self._due:
            self._find_time(self._due)
            return True
        if (left := timeout - (self._clock.monotonic() - began)) > 0:
            self._clock.sleep(min(left, SLICE))
        self._waited += self._clock.monotonic() - began
        if self._waited > READ_SECONDS:
            self._check_stalled()
        return False

    def close(self) -> None:
        self._follower.close()

    def _until_now(self) -> Position | None:
        """The last message of the moment at which the topic was opened."""
        return self._follower.end if isinstance(self._follower, CommittedUntilNow) else self._end

    def _rows(self, batch: RecordBatch) -> int:
        """How many of the records are to be returned."""
        if self._seqno:
            return len(batch) if batch.seqnos is None else int(np.searchsorted(batch.seqnos, self._seqno, side="right"))
        if self._now:
            end = self._until_now()
            return 0 if end is None else batch.positions.search(after(end))
        if self._due is not None and bool((batch.publish_times >= self._due).any()):
            self._find_time(self._due)
        return len(batch) if self._stop is None else batch.positions.search(self._stop)

    def _check_stalled(self) -> None:
        """Raises ReplayStalled if messages do not come that the log had when the topic was opened."""
        reach, self._waited = self._follower.reach(), 0.0
        at = max(reach.at, self._floor)
        if self._end is not None and (reach.backlog or not reaches(at, self._end)):
            raise stalled(self.topic, self._end, at, READ_SECONDS)

    def _is_over(self) -> bool:
        """Whether no record will follow, where the follower has none to return."""
        reach = self._follower.reach()
        if reach.backlog:
            return False
        if self._seqno:
            return reach.next_seqno is not None and reach.next_seqno > self._seqno
        at = max(reach.at, self._floor)
        if self._now:
            end = self._until_now()
            return end is None or complete(at, after(end), end)
        stop = self._stop
        if stop is None or (reach.first_open is not None and reach.first_open < stop):
            return False
        return after(at) >= stop or (
            Position(at.ledger, at.entry + 1) >= stop and complete(at, stop, self._broker.last_position(self.topic))
        )
