"""The reader of a memory broker."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from broker_io.batch import PlacedBatch
from broker_io.errors import Closed, PositionTrimmed, TopicNotFound
from broker_io.memory.log import Connection
from broker_io.memory.topic import TopicLog
from broker_io.position import Position


class MemoryReader:
    """Reads one incarnation of a topic from behind `cursor`; what was trimmed up to `floor` is not missed."""

    def __init__(
        self, connection: Connection, topic: str, log: TopicLog, cursor: Position, floor: Position, *, compacted: bool
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._log = log
        self._cursor = cursor
        self._floor = floor
        self._compacted = compacted
        self._closed = False

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

    def when_more(self, tell: Callable[[], None]) -> None:
        with self._connection.log.changed:
            ended = self._closed or self._connection.closed or self._log.deleted
            if ended or self._log.read(self._cursor, 1, compacted=self._compacted) is not None:
                tell()
            else:
                self._log.waiting[self] = tell

    def close(self) -> None:
        with self._connection.log.changed:
            self._closed = True
            self._log.waiting.pop(self, None)
            self._connection.log.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed or self._connection.closed:
            raise Closed(f"this reader of topic {self._topic!r} is closed: open another one")
        if self._log.deleted:
            raise TopicNotFound(f"topic {self._topic!r} was deleted: open a reader of the new one")
        if self._log.lost > self._floor and self._log.lost_behind(self._cursor, compacted=self._compacted):
            raise PositionTrimmed(
                f"topic {self._topic!r}: messages behind {self._cursor} were trimmed up to {self._log.lost}:"
                " start at EARLIEST or later"
            )
