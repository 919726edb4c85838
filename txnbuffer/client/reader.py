"""Readers of committed records

`CommittedReader` reads the snapshot topic and the logs directly, in any process. `AsyncReader` runs one in a thread.

A follower reads one topic, from any position: visible records in log order, with their seqnos. The log is applied from
the position of the snapshot on, which may be after the position where reading starts: what is before it is read from
the log a second time, by the visibility of the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock, current
from broker_io.errors import Error, PositionTrimmed, TopicNotFound
from broker_io.partitions import partition_name, partition_of
from broker_io.port import Broker, PartitionedBroker, Resource, messages_up_to
from broker_io.position import NO_INDEX
from snapshots.errors import SnapshotMissing
from snapshots.format import reaches
from txnbuffer.buffer.visibility import reader_floor
from txnbuffer.checks import check_limit, check_topics, check_wait
from txnbuffer.client import lifecycle
from txnbuffer.client.lifecycle import ClosedOnExit, opened
from txnbuffer.client.records import RecordBatch
from txnbuffer.errors import InvalidRequest, ProtocolStopped, ReplayStalled
from txnbuffer.follow import LogFollower, RecordFollower, VisibleRecords, unpacked
from txnbuffer.model import EARLIEST, Position
from txnbuffer.protocol import any_transactional
from txnbuffer.recordset import TOGETHER, rows_within, without_content
from txnbuffer.recovery.restore import LOST, LoadedTopic, load

Start: TypeAlias = "Position | datetime | str"
"""Where to start: a position, a time, "beginning" or "end"."""

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


class CommittedFollower:
    """One topic of a reader: its committed records in log order, each with its seqno.

    `first_seqno`: that of the first visible record of the log where the log was opened, which is at or before the
    start; None if unknown.
    """

    def __init__(self, broker: Broker, topic: str, start: StartPoint) -> None:
        self.topic = topic
        self._broker = broker
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

    def poll(self, limit: int) -> RecordBatch | None:
        """Return 1 to `limit` visible records without waiting; None if there are none."""
        while self._rest is None:
            visible = self._next_visible(limit) if self._opened and not self._blocked else None
            if visible is not None:
                self._take(visible)
            elif self._stopped is not None:
                raise self._stopped
            else:
                return None
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
            if self._stopped is None:
                self._log.check_alive()
            return False
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

    def _take(self, visible: VisibleRecords) -> None:
        """Keep the records after the start for `poll`. A record set that cannot be unpacked stops the topic."""
        records, seqnos, last, broken = visible
        self._delivered = True
        if broken is None:
            self._at = last
        else:
            self._stopped, self._blocked = broken, True
            self._at = records.positions.last if len(records) else self._at
        first = self._start.first_of(records)
        if len(records) > first:
            self._rest = RecordBatch.of(self.topic, records, seqnos).take(slice(first, None))
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
        continues = reaches(self._log.at, loaded.resume)
        if continues:
            with LogFollower(self._broker, self.topic, loaded.buffer, loaded.resume) as newest:
                newest.replay(self._log.at, exactly=True, timeout=MAX_WAIT)
            self._log.buffer = loaded.buffer
        else:
            log = self._follow(loaded)
            self._log.close()
            self._log = log
        seqno, at = loaded.anchor(Position(self._at.ledger, self._at.entry + 1))
        if seqno is not None:
            seqno += self._log.count_visible(at, self._at, timeout=MAX_WAIT)
        self._log.next_seqno = seqno
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

    def __init__(self, broker: Broker, topic: str, start: StartPoint) -> None:
        self.topic = topic
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

    def poll(self, limit: int) -> RecordBatch | None:
        if self._records is None:
            if self._stopped is not None:
                raise self._stopped
            return None
        batch, rest = self._records.take(slice(limit)), self._records.take(slice(limit, None))
        self._records = rest if len(rest) else None
        over = self._records is None and self._messages is None and self._stopped is None
        self._at = self._read_to if over else batch.positions.last
        return RecordBatch.of(self.topic, batch, None)

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


class ReadTopics:
    """The topics and partitions that a reader reads. `partitioned`: the partitioned topics; they may get more.

    Raises InvalidRequest, TopicNotFound.
    """

    def __init__(self, broker: Broker, topics: str | Iterable[str], start: Start | Mapping[str, Start]) -> None:
        self._broker = broker
        self._start = start
        self._names = check_topics(topics)
        known = set(broker.topics())
        self.partitioned = [name for name in self._names if name not in known and _count(broker, name)]
        self._read = {name: name for name in self._names if name in known}
        for name in self._names:
            if name not in known and name not in self.partitioned:
                raise TopicNotFound(
                    f"there is no topic {name!r} to read: create it, correct the name, or ask for the right to read it"
                )
        self._add(known)
        if isinstance(start, Mapping):
            unread = sorted(start.keys() - {*self._names, *self._read})
            parts = [(name, partition_of(name)) for name in unread]
            unknown = [name for name, part in parts if part is None or part.topic not in self.partitioned]
            if unknown:
                raise InvalidRequest(f"start has {', '.join(unknown)}, which this reader does not read")

    def first(self) -> list[tuple[str, Start]]:
        """Return all existing topics and partitions, each with its start."""
        return [(name, self._start_of(name, topic)) for name, topic in self._read.items()]

    def parts(self) -> list[tuple[str, str]]:
        """Return all existing topics and partitions, each with the topic that it belongs to."""
        return list(self._read.items())

    def added(self, read: set[str]) -> list[tuple[str, Start]]:
        """Return the partitions that were added, other than those in `read`, each with its start."""
        self._add(set(self._broker.topics()))
        new = [(name, self._start_of(name, topic)) for name, topic in self._read.items() if name not in read]
        return [(name, "beginning" if start == "end" else start) for name, start in new]

    def _add(self, known: set[str]) -> None:
        for topic in self.partitioned:
            names = (partition_name(topic, number) for number in range(_count(self._broker, topic)))
            self._read |= {name: topic for name in names if name in known}

    def _start_of(self, name: str, topic: str) -> Start:
        if not isinstance(self._start, Mapping):
            found = self._start
        elif name in self._start:
            return self._start[name]
        else:
            found = self._start.get(topic, "beginning")
        if isinstance(found, Position) and name != topic:
            raise InvalidRequest(
                f"start {found} is a position in one partition of {topic!r}: give a start for each partition"
            )
        return found


def _count(broker: Broker, topic: str) -> int:
    return broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0


ISOLATIONS = ("read_committed", "read_uncommitted")

PARTITION_CHECK_INTERVAL = 10.0
"""Seconds between checks for new partitions of a topic."""
CLOSED = "the reader is closed: open another one"
SLICE = 0.01
"""Seconds that a reader of several topics waits for one of them before it checks the next."""


class Lag(NamedTuple):
    """The distance of a reader from the end of one topic's log, in messages; markers and record sets count as one.

    - `next_position`: where the reader continues.
    - `decided_position`: the reader can return all visible records up to here without waiting for a transaction.
    - `end`: the position of the last message; None if the topic has none.
    - `behind`: the number of messages from `next_position` to `end`.
    - `undecided`: how many of these are after `decided_position`: an earlier transaction is still open, or this reader
      has not read them yet.
    """

    next_position: Position
    decided_position: Position
    end: Position | None
    behind: int
    undecided: int


class CommittedReader(Resource):
    """Reads the committed records of one or more topics, each topic in log order. It needs no running service.

        with open_broker("file:DIR") as broker, CommittedReader(broker, "orders") as reader:
            for batch in reader: ...

    - `topics`: one name or several. The name of a partitioned topic means all its partitions (`T-partition-0` and so
      on). Partitions that are added later are read from their beginning.
    - `start`: "beginning"; "end"; the Position of the first record to read; or a datetime, for the first record
      published at or after it (local time if it has no time zone). A mapping gives a start for each topic or partition.
    - `isolation`: "read_committed", or "read_uncommitted" for all records in the log, without seqnos.

    Creating a reader restores the transaction state of each topic from its snapshot; reading then replays the log.
    Raises TopicNotFound, PositionTrimmed, InvalidRequest, the errors of damaged snapshots and logs, and UsedAfterFork
    in a forked child.
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
            raise InvalidRequest(f"isolation must be one of {', '.join(ISOLATIONS)}, got {isolation!r}")
        self._broker = broker
        self._forked_from = lifecycle.generation()
        self._clock = clock or current().clock
        self._followers: list[CommittedFollower | UncommittedFollower] = []
        self._turn = 0
        self._closed = False
        self._kind = CommittedFollower if isolation == "read_committed" else UncommittedFollower
        self._read_topics = ReadTopics(broker, topics, start)
        try:
            self._open(self._read_topics.first())
        except BaseException:
            self.close()
            raise
        self._check_at = self._clock.monotonic() + PARTITION_CHECK_INTERVAL

    def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """Return the next 1 to `limit` visible records of one topic; None if there are none within `timeout` seconds.

        Raises PositionTrimmed if the next records were trimmed, and the error that stopped a topic.
        """
        check_limit(limit)
        lifecycle.check(self._forked_from)
        deadline = self._clock.monotonic() + check_wait(timeout)
        self._check_open()
        while True:
            self._add_partitions()
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
            if not self._followers:  # a topic whose partitions do not exist yet
                self._clock.sleep(min(left, SLICE))
                continue
            self._followers[self._turn].advance(left if len(self._followers) == 1 else min(left, SLICE))
            self._turn = (self._turn + 1) % len(self._followers)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(CLOSED)

    def _open(self, topics: list[tuple[str, Start]]) -> None:
        for topic, start in topics:
            self._followers.append(self._kind(self._broker, topic, start_point(self._broker, topic, start)))

    def _add_partitions(self) -> None:
        """Start reading new partitions. If one cannot be opened now, the next check tries again."""
        if not self._read_topics.partitioned or self._clock.monotonic() < self._check_at:
            return
        self._check_at = self._clock.monotonic() + PARTITION_CHECK_INTERVAL
        try:
            self._open(self._read_topics.added({follower.topic for follower in self._followers}))
        except Error as error:
            if not error.retryable:
                raise

    def __iter__(self) -> Iterator[RecordBatch]:
        """Yield batches without end; leave the loop to stop."""
        while True:
            if (batch := self.read(timeout=1.0)) is not None:
                yield batch

    @property
    def epochs(self) -> tuple[int, ...]:
        """The newest epoch of each coordinator whose markers this reader has read."""
        return tuple(epoch for follower in self._followers for epoch in follower.epochs)

    @property
    def first_seqnos(self) -> dict[str, int | None]:
        """By topic: the seqno of the first visible record that the log still had, at or before the start; or None."""
        return {follower.topic: follower.first_seqno for follower in self._followers}

    def lag(self) -> dict[str, Lag]:
        """Return the lag of each topic and partition, by name."""
        self._check_open()
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
        """Close the reader. In a forked child this does nothing, because the parent owns the connections and files."""
        if self._forked_from != lifecycle.generation():
            return
        self._closed = True
        for follower in self._followers:
            follower.close()


def start_point(broker: Broker, topic: str, start: Start) -> StartPoint:
    """Return the first record to read for the argument `start`. Raises InvalidRequest, PositionTrimmed."""
    if isinstance(start, Position):
        if EARLIEST < start < Position(first := broker.ledgers(topic)[0].ledger, 0):
            raise PositionTrimmed(
                f"topic {topic} begins at ledger {first}: position {start} was trimmed; start at the beginning"
            )
        return StartPoint(start)
    if start == "beginning":
        return StartPoint(EARLIEST)
    last = broker.last_position(topic)
    end = EARLIEST if last is None else Position(last.ledger, last.entry + 1)
    if start == "end":
        return StartPoint(end)
    if not isinstance(start, datetime):
        raise InvalidRequest(f"start must be a position, a datetime, 'beginning' or 'end', got {start!r}")
    time = _milliseconds(start)
    found = broker.position_at(topic, time)
    return StartPoint(end, time) if found is None else StartPoint(found)


def _milliseconds(time: datetime) -> int:
    try:
        return max(round(time.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"start is out of range: {time}") from None


Result = TypeVar("Result")

POLL = 0.5
"""Seconds of one wait in the thread; `close` waits no longer than this."""


def _retrieve(reading: asyncio.Future[RecordBatch | None]) -> None:
    """Mark the error of a read as seen: if its caller was cancelled and no other read follows, nobody raises it."""
    if not reading.cancelled():
        reading.exception()


class AsyncReader(ClosedOnExit):
    """A CommittedReader for asyncio, created by `Client.reader`.

    Records of a cancelled read are returned by the next one.
    """

    def __init__(self, reader: CommittedReader, thread: Executor) -> None:
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
        """Open a CommittedReader in a thread of its own. Raises the errors of CommittedReader."""
        thread = current().threads.executor(1, "txnbuffer-reader")
        try:
            reader = await opened(thread, lambda: CommittedReader(broker(), topics, start=start, isolation=isolation))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(reader, thread)

    async def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """Return the next 1 to `limit` visible records of one topic; None if there are none within `timeout` seconds.

        Concurrent reads run one after the other. Raises the errors of `CommittedReader.read`.
        """
        check_limit(limit)
        deadline = asyncio.get_running_loop().time() + check_wait(timeout)
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
                self._reading.add_done_callback(_retrieve)
            try:
                batch = await asyncio.shield(self._reading)
            except Error as error:
                if error.retryable:
                    self._reading = None
                raise
            self._reading = None
            if batch is not None and len(batch) > limit:  # a cancelled call with a higher limit read it
                self._reading = loop.create_future()
                self._reading.set_result(batch.take(slice(limit, None)))
                batch = batch.take(slice(limit))
            if batch is not None or left <= 0:
                return batch

    async def __aiter__(self) -> AsyncIterator[RecordBatch]:
        """Yield batches without end; leave the loop to stop."""
        while True:
            if (batch := await self.read(timeout=60.0)) is not None:
                yield batch

    async def lag(self) -> dict[str, Lag]:
        """Return the lag of each topic and partition, by name."""
        return await self._call(self._reader.lag)

    async def close(self) -> None:
        """Close the reader once a running read has ended. Cancelling the caller does not stop this."""
        if self._closing is None:
            self._closing = self._call(self._reader.close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(self._closing)

    def _call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function in the reader's thread. Raises InvalidRequest once the reader is closed."""
        if self._closing is not None:
            raise InvalidRequest(CLOSED)
        return asyncio.get_running_loop().run_in_executor(self._thread, function)
