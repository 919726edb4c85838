"""A broker of lists in memory, shared by as many handles as there are processes to simulate.

A `MemoryLog` is the cluster, a `MemoryBroker` one process's connection to it: closing the handle loses
nothing, `connect()` opens another one, and faults belong to a handle. Ledger numbers are assigned across
all topics, so they grow with gaps. Compaction leaves the raw log as it is; the compacted view outlives the
trimming of the raw ledgers below it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from broker_io.batch import Batch
from broker_io.environment import Clock, SystemClock
from broker_io.errors import Closed, Fenced, StillHeld
from broker_io.memory.faults import Faults
from broker_io.memory.handles import MemoryConnection, MemoryLog, MemoryReader, MemoryWriter
from broker_io.memory.topic import TopicLog
from broker_io.partitions import Hashing, partition_name
from broker_io.port import MAX_MESSAGE_BYTES, OWN_PREFIX, Ledger, check_compaction, check_topic_name
from broker_io.position import EARLIEST, LATEST, Position, Positions

LEDGER_ENTRIES = 100_000


class MemoryBroker:
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
            clock=clock or SystemClock(),
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
            return MemoryReader(self._connection, topic, log, start, floor, compacted=compacted)

    def ledgers(self, topic: str) -> list[Ledger]:
        with self.log.changed:
            return [ledger.describe() for ledger in self._topic(topic).ledgers]

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
