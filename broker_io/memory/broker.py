"""A broker of lists in memory, shared by as many handles as there are processes to simulate.

A `MemoryLog` is the cluster, a `MemoryBroker` one process's connection to it: closing the handle loses
nothing, `connect()` opens another one, and faults belong to a handle. Ledger numbers are assigned across
all topics, so they grow with gaps. Compaction leaves the raw log as it is; the compacted view outlives the
trimming of the raw ledgers below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from broker_io.batch import Batch, PlacedBatch
from broker_io.environment import Clock, current
from broker_io.errors import (
    CallerError,
    Closed,
    DiskWatermark,
    Error,
    Fenced,
    PositionTrimmed,
    StillHeld,
    TopicNotFound,
    as_error,
)
from broker_io.memory.faults import AppendFault, Faults, Held
from broker_io.memory.topic import TopicLog
from broker_io.partitions import Hashing, partition_name, partitioned
from broker_io.port import (
    MAX_MESSAGE_BYTES,
    OWN_PREFIX,
    Ledger,
    Resource,
    TogetherAppend,
    TogetherResult,
    check_batch,
    check_compaction,
    check_together,
    check_topic_name,
)
from broker_io.position import EARLIEST, LATEST, Position, Positions

POLL_SECONDS = 0.01
LONGEST_WAIT = 60.0
"""A wait is done in parts of this length, since the timeout of a lock must be below 292 years."""


class MemoryLog:
    """The topics and their writers, shared by all handles."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        ledger_entries: int,
        max_message_bytes: int,
        compacted_prefix: str = OWN_PREFIX,
    ) -> None:
        environment = current()
        self.clock = clock or environment.clock
        self.max_message_bytes = max_message_bytes
        self.compacted_prefix = compacted_prefix
        self.topics: dict[str, TopicLog] = {}
        self.writers: dict[TopicLog, list[MemoryWriter]] = {}
        self.partitions: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.changed = environment.threads.condition()
        self._own_time = self.clock is not environment.clock
        self._ledger_entries = ledger_entries
        self._ledgers = count(1)
        self._incarnations = count(1)

    def create(self, name: str) -> None:
        if name in self.partitions:
            raise partitioned(name)
        if name not in self.topics:
            incarnation = f"memory-{id(self):x}-{next(self._incarnations)}"
            log = TopicLog(incarnation, lambda: next(self._ledgers), self._ledger_entries)
            if name in self.deleted:  # a position of the deleted topic exists in no later one
                log.lost = Position(log.ledgers[0].number, -1)
            self.topics[name] = log
            self.writers[log] = []

    def topic(self, name: str) -> TopicLog:
        log = self.topics.get(check_topic_name(name))
        if name in self.partitions:
            raise partitioned(name)
        if log is None:
            raise TopicNotFound(f"there is no topic {name!r}: create it first")
        return log

    def wait(self, seconds: float) -> None:
        """Wait for an append or a timeout; the caller holds the lock."""
        if self._own_time:
            self.clock.sleep(min(seconds, POLL_SECONDS))
        else:
            self.changed.wait(min(seconds, LONGEST_WAIT))


@dataclass(slots=True, eq=False)
class MemoryConnection:
    """The state that the readers and writers of one broker handle share."""

    log: MemoryLog
    faults: Faults
    closed: bool = False

    def append(self, appends: Sequence[tuple[MemoryWriter, Batch]], *, alone: bool) -> Future[Any]:
        """Append in one operation; the future has the outcomes, or is that of the only append."""
        with self.log.changed:
            sizes = [check_batch(batch, self.log.max_message_bytes) for _, batch in appends]
            if not alone and len(sizes) > 1:
                check_together(sum(sizes))
            unit = Held(appends, self.faults, alone)
            outcome = self._outcome(unit, [writer for writer, _ in appends])
        if outcome is not None:
            unit.settle(outcome)
        return unit.future

    def _outcome(self, unit: Held, writers: Sequence[MemoryWriter]) -> list[Positions | Error] | Exception | None:
        """Append and return the outcome, or None if the acknowledgement is held back."""
        for writer in writers:
            if writer.dead is not None:
                return writer.dead
        faults = [None if writer.deleted else self.faults.take_append(writer.topic) for writer in writers]
        if any(faults):
            return self._append_badly(unit, faults)
        held = [written for writer in writers if (written := self.faults.holding(writer.topic)) is not None]
        if not held or all(writer.deleted for writer in writers):
            return unit.put()
        if all(held):
            unit.put()
        self.faults.held.append(unit)
        return None

    def _append_badly(self, unit: Held, faults: Sequence[AppendFault | None]) -> list[Positions | Error] | Exception:
        outcomes: list[Positions | Error] = []
        for (writer, batch), fault in zip(unit.appends, faults, strict=True):
            if fault is None or fault.error is None:
                continue
            if unit.alone:
                for _ in range(fault.copies):
                    writer.put(batch if fault.written is None else batch.take(slice(0, fault.written)))
            elif isinstance(fault.error, DiskWatermark):
                return fault.error
            elif fault.written is None:
                unit.put()
            writer.fail(fault.error)
            return fault.error
        for (writer, batch), fault in zip(unit.appends, faults, strict=True):
            for _ in range(fault.copies if fault is not None else 1):
                outcome = writer.put(batch)
            outcomes.append(outcome)
        return outcomes


@dataclass(eq=False)
class MemoryReader(Resource):
    """Reads one incarnation of a topic after `cursor`; messages that were trimmed up to `floor` are not missing."""

    _connection: MemoryConnection
    _topic: str
    _log: TopicLog
    _cursor: Position
    _floor: Position
    _compacted: bool
    _closed: bool = False

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        log = self._connection.log
        with log.changed:
            if (fault := self._connection.faults.take_read(self._topic)) is not None:
                raise fault.error
            deadline = log.clock.monotonic() + timeout
            while True:
                self._check()
                batch = self._log.read(self._cursor, max(limit, 1), compacted=self._compacted)
                if batch is not None:
                    self._cursor = batch.positions.last
                    return batch
                if (missing := deadline - log.clock.monotonic()) <= 0:
                    return None
                log.wait(missing)

    def notify_when_readable(self, callback: Callable[[], None]) -> None:
        with self._connection.log.changed:
            ended = self._closed or self._connection.closed or self._log.deleted
            if ended or self._log.read(self._cursor, 1, compacted=self._compacted) is not None:
                callback()
            else:
                self._log.waiting[self] = callback

    def close(self) -> None:
        with self._connection.log.changed:
            self._closed = True
            self._log.waiting.pop(self, None)
            self._connection.log.changed.notify_all()

    def _check(self) -> None:
        if self._closed or self._connection.closed:
            raise Closed(f"this reader of topic {self._topic!r} is closed: open another one")
        if self._log.deleted:
            raise TopicNotFound(f"topic {self._topic!r} was deleted: open a reader of the new one")
        if self._log.lost > self._floor and self._log.lost_after(self._cursor, compacted=self._compacted):
            raise PositionTrimmed(
                f"topic {self._topic!r}: messages after {self._cursor} were trimmed up to {self._log.lost}:"
                " start at EARLIEST or later"
            )


class MemoryWriter(Resource):
    """Appends to one incarnation of a topic. Closing does not wait for appends that `faults.hold` holds back."""

    def __init__(self, connection: MemoryConnection, topic: str, log: TopicLog, *, exclusive: bool) -> None:
        self.connection = connection
        self.topic = topic
        self.exclusive = exclusive
        self._log = log
        self.dead: Exception | None = None
        """The error of later appends."""

    @property
    def deleted(self) -> bool:
        """Whether its topic was deleted."""
        return self._log.deleted

    def append(self, batch: Batch) -> Future[Positions]:
        return self.connection.append([(self, batch)], alone=True)

    def put(self, batch: Batch) -> Positions | Error:
        """Append to the log; the caller holds the lock."""
        if self.deleted:
            return TopicNotFound(f"topic {self.topic!r} was deleted: open a writer of the new one")
        positions = self._log.append(batch, self.connection.log.clock.now_ms())
        self.connection.log.changed.notify_all()
        return positions

    def fence(self, error: Fenced) -> None:
        """Fail all held and later appends: another exclusive writer was opened."""
        with self.connection.log.changed:
            self.dead = error
            self._leave()
            for held in [held for held in self.connection.faults.held if self in held.writers]:
                held.end(error)

    def close(self) -> None:
        with self.connection.log.changed:
            self.dead = self.dead or Closed(f"this writer of topic {self.topic!r} is closed: open another one")
            self._leave()

    def fail(self, error: Exception) -> None:
        """Fail all later appends, unless the error is retryable; the caller holds the lock."""
        if not getattr(error, "retryable", False):
            self.dead = self.dead or error
            if isinstance(error, Fenced):
                self._leave()

    def _leave(self) -> None:
        writers = self.connection.log.writers.get(self._log, [])
        if self in writers:
            writers.remove(self)
            self.connection.log.changed.notify_all()


LEDGER_ENTRIES = 100_000


class MemoryBroker(Resource):
    """A handle on topics in memory; `MemoryBroker()` has topics of its own.

    `ledger_entries` messages fill a ledger; `max_message_bytes` limits one message;
    topics whose names begin with `compacted_prefix` may be compacted.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        ledger_entries: int = LEDGER_ENTRIES,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        compacted_prefix: str = OWN_PREFIX,
        log: MemoryLog | None = None,
    ) -> None:
        self.log = log or MemoryLog(
            clock=clock,
            ledger_entries=ledger_entries,
            max_message_bytes=max_message_bytes,
            compacted_prefix=compacted_prefix,
        )
        self.hashing: Hashing = "java"
        self.faults = Faults(self.log.changed)
        self._connection = MemoryConnection(self.log, self.faults)

    def connect(self) -> MemoryBroker:
        """Another process's handle on the same topics."""
        return MemoryBroker(log=self.log)

    @property
    def max_message_bytes(self) -> int:
        return self.log.max_message_bytes

    def topics(self) -> list[str]:
        with self.log.changed:
            self._check_open()
            return sorted(self.log.topics.keys() - self.log.partitions.keys())

    def create_topic(self, topic: str) -> None:
        with self.log.changed:
            self._check_open()
            self.log.create(check_topic_name(topic))

    def delete_topic(self, topic: str) -> None:
        with self.log.changed:
            log = self._topic(topic)
            log.deleted = True
            log.notify()
            del self.log.topics[topic], self.log.writers[log]
            self.log.deleted.add(topic)
            self.log.changed.notify_all()

    def partitions(self, topic: str) -> int:
        with self.log.changed:
            self._check_open()
            return self.log.partitions.get(topic, 0)

    def partition(self, topic: str, count: int) -> None:
        """Create a partitioned topic, or add partitions to it."""
        with self.log.changed:
            self._check_open()
            for number in range(count):
                self.log.create(partition_name(check_topic_name(topic), number))
            self.log.partitions[topic] = count

    def incarnation(self, topic: str) -> str:
        with self.log.changed:
            return self._topic(topic).incarnation

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> MemoryWriter:
        with self.log.changed:
            log = self._topic(topic)
            if exclusive and wait is not None:
                log = self._wait_for_owner(topic, wait)
            writers = self.log.writers[log]
            if exclusive:
                for older in [*writers]:
                    older.fence(Fenced(f"another exclusive writer opened topic {topic!r}"))
            elif any(writer.exclusive for writer in writers):
                raise Fenced(f"topic {topic!r} is held by an exclusive writer: wait until it is closed")
            writer = MemoryWriter(self._connection, topic, log, exclusive=exclusive)
            writers.append(writer)
            return writer

    def append_together(self, appends: Sequence[TogetherAppend], done: Callable[[TogetherResult], None]) -> None:
        """See `AtomicBroker`."""
        ours = []
        for writer, batch in appends:
            if not isinstance(writer, MemoryWriter) or writer.connection is not self._connection:
                raise CallerError(f"{writer!r} is not a writer of this broker: open one with it")
            ours.append((writer, batch))
        future = self._connection.append(ours, alone=False)
        future.add_done_callback(lambda _: done(as_error(error) if (error := future.exception()) else future.result()))

    def space_refusal(self) -> None:
        """See `AtomicBroker`: memory has no watermark."""

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> MemoryReader:
        with self.log.changed:
            log = self._topic(topic)
            floor = EARLIEST
            if start == EARLIEST:
                floor = log.lost
            elif start == LATEST:
                start = max(log.last or EARLIEST, log.lost)
            elif inclusive:
                start = start._replace(batch=start.batch - 1)  # right below it
            return MemoryReader(self._connection, topic, log, start, floor, compacted)

    def ledgers(self, topic: str) -> list[Ledger]:
        with self.log.changed:
            log = self._topic(topic)
            return [ledger.describe(log.original) for ledger in log.ledgers]

    def first_position(self, topic: str) -> Position | None:
        with self.log.changed:
            return self._topic(topic).first_position()

    def last_position(self, topic: str) -> Position | None:
        with self.log.changed:
            return self._topic(topic).last

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        with self.log.changed:
            return self._topic(topic).position_at(time_ms)

    def roll(self, topic: str) -> None:
        with self.log.changed:
            self._topic(topic).roll()

    def trim(self, topic: str, first_ledger: int) -> None:
        with self.log.changed:
            self._topic(topic).trim(first_ledger)

    def compact(self, topic: str) -> None:
        with self.log.changed:
            log = self._topic(topic)
            check_compaction(topic, self.log.compacted_prefix)
            log.compact()

    def repeat(self, topic: str, first: Position, last: Position) -> Positions:
        """Append the messages from `first` to `last` once more, as a broker may do after a crash."""
        with self.log.changed:
            log = self._topic(topic)
            before = first._replace(batch=first.batch - 1)
            batches = [
                batch.take(slice(0, batch.positions.search(last, right=True))) for batch in log.batches_after(before)
            ]
            positions = log.append(Batch.concat([batch.messages for batch in batches]), self.log.clock.now_ms())
            self.log.changed.notify_all()
            return positions

    def close(self) -> None:
        with self.log.changed:
            self._connection.closed = True
            for writers in self.log.writers.values():
                for writer in [*writers]:
                    if writer.connection is self._connection:
                        writer.close()
            self.log.changed.notify_all()

    def _topic(self, name: str) -> TopicLog:
        self._check_open()
        return self.log.topic(name)

    def _wait_for_owner(self, name: str, seconds: float) -> TopicLog:
        """The topic once no exclusive writer has it open. Raises StillHeld."""
        deadline = self.log.clock.monotonic() + seconds
        while any(writer.exclusive for writer in self.log.writers[self._topic(name)]):
            if (missing := deadline - self.log.clock.monotonic()) <= 0:
                raise StillHeld(f"topic {name!r} is held by an exclusive writer that is still open: wait longer")
            self.log.wait(missing)
        return self._topic(name)

    def _check_open(self) -> None:
        if self._connection.closed:
            raise Closed("this broker is closed: open another one")
