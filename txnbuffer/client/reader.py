"""Reading what committed, from the snapshot topic and the logs alone, in any process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import NamedTuple, Self

from broker_io.environment import Clock, SystemClock
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker, messages_up_to
from txnbuffer.checks import check_limit
from txnbuffer.client import forking
from txnbuffer.client.follower import Beginning, CommittedFollower, Follower
from txnbuffer.client.read_topics import ReadTopics, Start
from txnbuffer.client.records import RecordBatch
from txnbuffer.client.uncommitted import UncommittedFollower
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position

ISOLATIONS = ("read_committed", "read_uncommitted")

LOOK = 10.0
"""Seconds between two looks whether a topic has more partitions."""
SLICE = 0.01
"""Seconds that a reader of several topics waits on one of them before it looks at the next."""


class Lag(NamedTuple):
    """How far a reader is behind on one topic, in messages of its log, markers included.

    `behind`: between what was handed out and the end; `undecided`: of these, those that nobody may
    see yet, because a transaction below them is open or because the reader has not come to them.
    """

    next_position: Position
    decided_position: Position
    end: Position | None
    behind: int
    undecided: int


class CommittedReader:
    """Reads the visible records of one topic or several, each topic in log order.

        with open_broker("file:DIR") as broker, CommittedReader(broker, "orders") as reader:
            for batch in reader: ...

    A topic with partitions is read as all of these, `T-partition-0` and so on, the later ones from their beginning.

    `start` is one `Start` for all topics, or a mapping from topic or partition to `Start`; a position is that of
    the first record wanted; a time, which may be to come, is when the first record wanted was published, local
    without a zone. `isolation` is "read_committed", or
    "read_uncommitted" for every record as it stands in the log. Raises TopicNotFound, PositionTrimmed,
    SnapshotDamaged and its kin, and UsedAfterFork in a child of the process that made it; nothing is handed out before
    the state of its topic is wholly recovered.
    """

    def __init__(
        self,
        broker: Broker,
        topics: str | Iterable[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
        clock: Clock | None = None,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise InvalidRequest(f"isolation {isolation!r} is none of {', '.join(ISOLATIONS)}")
        self._broker = broker
        self._forked_from = forking.generation()
        self._clock = clock or SystemClock()
        self._followers: list[Follower] = []
        self._turn = 0
        self._kind = CommittedFollower if isolation == "read_committed" else UncommittedFollower
        self._asked = ReadTopics(broker, topics, start)
        try:
            for topic, first in self._asked.first():
                self._followers.append(self._kind(broker, topic, beginning_of(broker, topic, first)))
        except BaseException:
            self.close()
            raise
        self._look_at = self._clock.monotonic() + LOOK

    def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """The next visible records of one topic, at most `limit`; None if there were none for `timeout` seconds."""
        check_limit(limit)
        forking.check(self._forked_from)
        deadline = self._clock.monotonic() + timeout
        while True:
            self._grow()
            for _ in self._followers:
                follower = self._followers[self._turn]
                self._turn = (self._turn + 1) % len(self._followers)
                if (batch := follower.poll(limit)) is not None:
                    return batch
            if sum(follower.advance(0.0) for follower in self._followers):
                continue
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return None
            if not self._followers:  # of a topic whose partitions are all to come
                self._clock.sleep(min(left, SLICE))
                continue
            self._followers[self._turn].advance(left if len(self._followers) == 1 else min(left, SLICE))
            self._turn = (self._turn + 1) % len(self._followers)

    def _grow(self) -> None:
        """Read the partitions too that came since; what can't be opened now is tried again at the next look."""
        if not self._asked.partitioned or self._clock.monotonic() < self._look_at:
            return
        self._look_at = self._clock.monotonic() + LOOK
        try:
            for topic, first in self._asked.came():
                self._followers.append(self._kind(self._broker, topic, beginning_of(self._broker, topic, first)))
                self._asked.taken(topic)
        except Error as error:
            if not error.retryable:
                raise

    def __iter__(self) -> Iterator[RecordBatch]:
        """Batches without end; stop by leaving the loop."""
        while True:
            if (batch := self.read(timeout=1.0)) is not None:
                yield batch

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of the newest owners that the logs tell of, as far as they were read."""
        return tuple(epoch for follower in self._followers for epoch in follower.epochs)

    def lag(self) -> dict[str, Lag]:
        """How far each topic is behind the end of its log at this moment."""
        lags = {}
        for follower in self._followers:
            ledgers = self._broker.ledgers(follower.topic)
            end = self._broker.last_position(follower.topic)
            at, decided = follower.next_position, follower.decided_position
            total = messages_up_to(ledgers, end)
            undecided = total - messages_up_to(ledgers, max(at, decided))
            lags[follower.topic] = Lag(at, decided, end, total - messages_up_to(ledgers, at), undecided)
        return lags

    def close(self) -> None:
        if self._forked_from != forking.generation():
            return  # what it has open is the parent's
        for follower in self._followers:
            follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def beginning_of(broker: Broker, topic: str, start: Start) -> Beginning:
    """The first record wanted. Raises InvalidRequest, PositionTrimmed."""
    if isinstance(start, Position):
        if EARLIEST < start < Position(first := broker.ledgers(topic)[0].ledger, 0):
            raise PositionTrimmed(f"topic {topic} begins with ledger {first}: {start} is gone; start at the beginning")
        return Beginning(start)
    if start == "beginning":
        return Beginning(EARLIEST)
    last = broker.last_position(topic)
    end = EARLIEST if last is None else Position(last.ledger, last.entry + 1)
    if start == "end":
        return Beginning(end)
    if not isinstance(start, datetime):
        raise InvalidRequest(f"can't start at {start!r}: give a position, a time, 'beginning' or 'end'")
    time = _milliseconds(start)
    found = broker.position_at(topic, time)
    return Beginning(end, time) if found is None else Beginning(found)


def _milliseconds(time: datetime) -> int:
    try:
        return max(round(time.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"{time} is no time that a record can have") from None
