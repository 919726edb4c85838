"""The writer of a memory broker: appends, the faults that hit them, and fencing."""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import Self

from broker_io.batch import Batch
from broker_io.checking import check_batch
from broker_io.errors import Closed, Fenced, TopicNotFound
from broker_io.memory.faults import AppendFault, Held
from broker_io.memory.log import Connection
from broker_io.memory.topic import TopicLog
from broker_io.position import Positions


class MemoryWriter:
    """Appends to one incarnation of a topic. Closing does not wait for what `faults.hold` keeps back."""

    def __init__(self, connection: Connection, topic: str, log: TopicLog, *, exclusive: bool) -> None:
        self.connection = connection
        self.topic = topic
        self.exclusive = exclusive
        self._log = log
        self._dead: Exception | None = None

    def append(self, batch: Batch) -> Future[Positions]:
        future: Future[Positions] = Future()
        with self.connection.log.changed:
            check_batch(batch, self.connection.log.max_message_bytes)
            outcome = self._append(batch, future)
        if outcome is not None:
            _resolve(future, outcome)
        return future

    def land(self, held: Held) -> None:
        with self.connection.log.changed:
            if held.positions is None and not held.future.done():
                mine = [other for other in self.connection.faults.held if other.writer is self]
                waiting = [other for other in mine if other.positions is None]
                if waiting[0] is not held:
                    raise ValueError("an earlier append of this writer has not landed yet: land that first")
                held.positions = self._write(held.batch)

    def settle(self, held: Held, outcome: Positions | Exception) -> None:
        with self.connection.log.changed:
            self.connection.faults.held.remove(held)
            if isinstance(outcome, Exception):
                self._fail(outcome)
        _resolve(held.future, outcome)

    def fence(self, error: Fenced) -> None:
        """Another exclusive writer came: nothing of this one gets in any more, and what is held fails."""
        with self.connection.log.changed:
            self._dead = error
            self._leave()
            for held in [held for held in self.connection.faults.held if held.writer is self]:
                self.settle(held, error)

    def close(self) -> None:
        with self.connection.log.changed:
            self._dead = self._dead or Closed(f"this writer of topic {self.topic!r} is closed: open another one")
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, batch: Batch, future: Future[Positions]) -> Positions | Exception | None:
        """Append now and return the outcome, or None if it is held back."""
        if self._dead is not None:
            return self._dead
        if self._log.deleted:
            return TopicNotFound(f"topic {self.topic!r} was deleted: open a writer of the new one")
        faults = self.connection.faults
        if (fault := faults.take_append(self.topic)) is not None:
            return self._append_badly(batch, fault)
        if (landing := faults.holding(self.topic)) is not None:
            faults.held.append(Held(self, batch, future, self._write(batch) if landing else None))
            return None
        return self._write(batch)

    def _append_badly(self, batch: Batch, fault: AppendFault) -> Positions | Exception:
        written = batch if fault.written is None else batch.take(slice(0, fault.written))
        for _ in range(fault.copies):
            positions = self._write(written)
        if fault.error is None:
            return positions
        self._fail(fault.error)
        return fault.error

    def _write(self, batch: Batch) -> Positions:
        positions = self._log.append(batch, self.connection.log.clock.now_ms())
        self.connection.log.changed.notify_all()
        return positions

    def _fail(self, error: Exception) -> None:
        if not getattr(error, "retryable", False):
            self._dead = self._dead or error
            if isinstance(error, Fenced):
                self._leave()

    def _leave(self) -> None:
        writers = self.connection.log.writers.get(self._log, [])
        if self in writers:
            writers.remove(self)
            self.connection.log.changed.notify_all()


def _resolve(future: Future[Positions], outcome: Positions | Exception) -> None:
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
