"""Reading what committed, from the snapshot topic and the logs alone, in any process.

One topic read as it stands in its log, for a reader that doesn't wait for transactions to end.

A committed reader for asyncio: reading goes on in a thread, one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock, SystemClock
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker, messages_up_to
from broker_io.position import NO_INDEX
from txnbuffer.checks import check_limit
from txnbuffer.client import lifecycle
from txnbuffer.client.follower import CommittedFollower, StartPoint, TopicFollower, unpacked
from txnbuffer.client.lifecycle import ClosedOnExit, opened
from txnbuffer.client.records import RecordBatch
from txnbuffer.client.routing import ReadTopics, Start
from txnbuffer.columns import present
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position
from txnbuffer.protocol import MARKER
from txnbuffer.recordset import TOGETHER, rows_within


class UncommittedFollower:
    """Hands out every record as it stands in the log, whatever became of its transaction."""

    def __init__(self, broker: Broker, topic: str, beginning: StartPoint) -> None:
        self.topic = topic
        self._beginning = beginning
        self._stopped: Error | None = None
        # A start within a record set is one within its message.
        start = beginning.position
        self._reader = broker.reader(topic, start if start == EARLIEST else start._replace(batch=NO_INDEX))
        self._messages: PlacedBatch | None = None
        self._held: PlacedBatch | None = None
        self._at = self._read_to = beginning.before

    @property
    def next_position(self) -> Position:
        return self._at

    @property
    def decided_position(self) -> Position:
        return self._read_to

    @property
    def epochs(self) -> tuple[int, ...]:
        return ()

    def poll(self, limit: int) -> RecordBatch | None:
        if self._held is None:
            if self._stopped is not None:
                raise self._stopped
            return None
        batch, rest = self._held.take(slice(limit)), self._held.take(slice(limit, None))
        self._held = rest if len(rest) else None
        over = self._held is None and self._messages is None and self._stopped is None
        self._at = self._read_to if over else batch.positions.last
        return RecordBatch.of(self.topic, batch, None)

    def advance(self, timeout: float) -> bool:
        if self._stopped is not None or self._held is not None:
            return False
        if self._messages is None:
            placed = self._reader.read(timeout=timeout)
            if placed is None:
                return False
            self._read_to = placed.positions.last
            self._messages = placed.take(~present(placed.messages.properties.get(MARKER), len(placed)))
        self._unpack(self._messages)
        return True

    def _unpack(self, messages: PlacedBatch) -> None:
        """Hold the records of some messages, and keep the others."""
        count = rows_within(messages, TOGETHER)
        self._messages = messages.take(slice(count, None)) if count < len(messages) else None
        records, self._stopped = unpacked(messages.take(slice(count)))
        records = records.take(slice(self._beginning.first_of(records), None))
        if len(records):
            self._held, self._beginning = records, StartPoint(EARLIEST)
        elif self._stopped is None and self._messages is None:
            self._at = self._read_to

    def close(self) -> None:
        self._reader.close()


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
        self._forked_from = lifecycle.generation()
        self._clock = clock or SystemClock()
        self._followers: list[TopicFollower] = []
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
        lifecycle.check(self._forked_from)
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
        if self._forked_from != lifecycle.generation():
            return  # what it has open is the parent's
        for follower in self._followers:
            follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def beginning_of(broker: Broker, topic: str, start: Start) -> StartPoint:
    """The first record wanted. Raises InvalidRequest, PositionTrimmed."""
    if isinstance(start, Position):
        if EARLIEST < start < Position(first := broker.ledgers(topic)[0].ledger, 0):
            raise PositionTrimmed(f"topic {topic} begins with ledger {first}: {start} is gone; start at the beginning")
        return StartPoint(start)
    if start == "beginning":
        return StartPoint(EARLIEST)
    last = broker.last_position(topic)
    end = EARLIEST if last is None else Position(last.ledger, last.entry + 1)
    if start == "end":
        return StartPoint(end)
    if not isinstance(start, datetime):
        raise InvalidRequest(f"can't start at {start!r}: give a position, a time, 'beginning' or 'end'")
    time = _milliseconds(start)
    found = broker.position_at(topic, time)
    return StartPoint(end, time) if found is None else StartPoint(found)


def _milliseconds(time: datetime) -> int:
    try:
        return max(round(time.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"{time} is no time that a record can have") from None


Result = TypeVar("Result")

POLL = 0.5
"""Seconds of one wait in the thread, so that closing is prompt."""


class AsyncReader(ClosedOnExit):
    """Hands out batches of visible records, each to one task; a read that was cancelled loses none of them."""

    def __init__(self, reader: CommittedReader, thread: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._thread = thread
        self._turn = asyncio.Lock()
        self._reading: asyncio.Future[RecordBatch | None] | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        broker: Callable[[], Broker],
        topics: str | Sequence[str],
        start: Start | Mapping[str, Start],
        isolation: str,
    ) -> AsyncReader:
        """Open a reader in a thread of its own. Raises what CommittedReader raises."""
        thread = ThreadPoolExecutor(1, "txnbuffer-reader")
        try:
            reader = await opened(thread, lambda: CommittedReader(broker(), topics, start=start, isolation=isolation))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(reader, thread)

    async def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """The next visible records of one topic, at most `limit`; None if there were none for `timeout` seconds.

        Tasks that read at the same time take turns.
        """
        check_limit(limit)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            return None
        try:
            return await self._read(limit, deadline)
        finally:
            self._turn.release()

    async def _read(self, limit: int, deadline: float) -> RecordBatch | None:
        loop = asyncio.get_running_loop()
        while True:
            left = deadline - loop.time()
            if self._reading is None:
                read = partial(self._reader.read, limit=limit, timeout=max(min(left, POLL), 0.0))
                self._reading = self._call(read)
            try:
                batch = await asyncio.shield(self._reading)
            except Error as error:
                if error.retryable:
                    self._reading = None
                raise
            self._reading = None
            if batch is not None and len(batch) > limit:  # it was read for somebody who wanted more, and was cancelled
                self._reading = loop.create_future()
                self._reading.set_result(batch.take(slice(limit, None)))
                batch = batch.take(slice(limit))
            if batch is not None or left <= 0:
                return batch

    async def __aiter__(self) -> AsyncIterator[RecordBatch]:
        """Batches without end; stop by leaving the loop."""
        while True:
            if (batch := await self.read(timeout=60.0)) is not None:
                yield batch

    async def lag(self) -> dict[str, Lag]:
        """How far each topic is behind the end of its log at this moment."""
        return await self._call(self._reader.lag)

    async def close(self) -> None:
        """End it, behind a read that goes on; who is cancelled meanwhile need not close it again."""
        if self._closing is None:
            self._closing = self._call(self._reader.close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(self._closing)

    def _call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Raises InvalidRequest."""
        if self._closing is not None:
            raise InvalidRequest("the reader was closed: open another one")
        return asyncio.get_running_loop().run_in_executor(self._thread, function)
