"""Appends of all topics: collected during a turn of the loop, written in groups, reported in order.

On a log that the service owns, everything that is collected is one *unit*: one atomic append to all topics
(`UnitAppends`). On a cluster each topic is appended to by itself (`TopicAppends`). While one append is synced the next
one fills, so a slower disk gets larger groups. Futures complete in other threads, which wake the loop once for many
appends.

In cluster mode only markers are appended to topics, and no client waits for them: the answers of a turn are sent first.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import ClassVar, NamedTuple

from broker_io import waits
from broker_io.batch import Batch
from broker_io.errors import (
    AppendUnknown,
    DiskFailed,
    DiskWatermark,
    Error,
    Fenced,
    NotLive,
    TooManyFiles,
    TopicNotFound,
    as_error,
)
from broker_io.port import MAX_PROPERTIES, AtomicBroker, TogetherResult, Writer
from broker_io.position import Position, Positions, maker
from broker_io.waits import Wait, Waker
from txnbuffer.errors import UnregisteredTopic
from txnbuffer.model import TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.door.connection import CELL_BYTES
from txnbuffer.service.log_readers import LogReader

FLIGHT_BYTES = 8 * 1024 * 1024
"""Approximate maximum size of one append."""


class AppendPart:
    """Messages to append, and the callbacks for the result.

    `rows` is their number, `size` their approximate bytes; `since` is when it was queued, by the time of the loop.
    """

    __slots__ = ("acknowledged", "batch", "failed", "rows", "since", "size")

    def __init__(
        self, batch: Batch, size: int, acknowledged: Callable[[], None], failed: Callable[[Error], None]
    ) -> None:
        self.batch = batch
        self.rows = len(batch.values.offsets) - 1
        self.acknowledged = acknowledged
        self.failed = failed
        self.since = 0.0
        self.size = size


class AppendInFlight(NamedTuple):
    """One append in flight to a topic: its parts, and all their messages in one batch."""

    topic: ServiceTopic
    parts: Sequence[AppendPart]
    batch: Batch


as_flight = maker(AppendInFlight)
_batch = attrgetter("batch")
LOST_ROLE = Fenced | NotLive
"""Errors of a log that another process owns, or that this one has owned in between."""


class ServiceTopic:
    """One topic: its append queue, its appends in flight, and its buffer (`followed`, None without transactions).

    `held`: appends are suspended. `compacting`: a compaction reads its ledgers, which are not trimmed meanwhile.
    `problem`: the error that stopped the topic; `write_problem`: the error that blocks its writer for now. `reader`:
    reads the topic if others write to it too. `deferred`: its appends wait until the answers of a turn were sent.
    `reports`: with a position, the calls to make once the buffer has applied the log up to it. `backlog`: what is
    queued came while it was held, and may be appended in pieces. `formed`: how many queued parts belong to the unit
    that is being formed: they are appended with it, whatever happens to the topic.
    """

    deferred = False
    backlog = False
    formed = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.writer: Writer | None = None
        self.followed: FollowedTopic | None = None
        self.held = True
        self.compacting = False
        self.lock = asyncio.Lock()
        self.problem: Error | None = None
        self.write_problem: Error | None = None
        self.reader: LogReader | None = None
        self.waiting: deque[AppendPart] = deque()
        self.flights: deque[AppendInFlight] = deque()
        self.reports: deque[tuple[Position, Callable[[], None]]] = deque()
        self.checks: dict[int, None] = {}
        """Transactions to count once the buffer has applied all that they sent."""
        self.awaiting_markers: set[TxnId] = set()
        """Transactions to query once the buffer has applied the log up to its current end."""
        self.asked_up_to: Position | None = None
        """Transactions that began after this position are not queried until the next tick."""
        self.blocked_by: TxnId | None = None
        """The oldest open transaction at the last tick, if there are messages after its first one."""
        self.blocked_since = 0.0
        """When it was first seen at a tick, in seconds since 1970."""

    @property
    def under_way(self) -> bool:
        """Whether something is in flight, or certain to be appended."""
        return bool(self.flights or self.formed)

    @property
    def missing(self) -> bool:
        """Whether a temporary problem stopped it; then it is registered again."""
        return self.problem is not None and self.is_temporary(self.problem)

    @property
    def stopped(self) -> bool:
        """Whether it needs an operator; what may pass by itself is retried."""
        return self.problem is not None and not (self.missing and self.problem.retryable)

    @property
    def obstacle(self) -> Error | None:
        """The error that stops or delays this topic."""
        return self.problem or self.write_problem or (None if self.reader is None else self.reader.problem)

    @staticmethod
    def is_temporary(problem: Error) -> bool:
        """Whether a problem may pass: the topic was deleted, or its log could not be read for now."""
        return isinstance(problem, TopicNotFound) or problem.retryable

    def open_writer(self) -> None:
        """Open the writer for what was queued, if nobody else does."""

    def writer_failed(self, error: Error) -> bool:
        """Handle a failed append; return whether all other appends have failed with it."""
        return isinstance(error, DiskFailed | AppendUnknown | LOST_ROLE)

    def durable(self, flight: AppendInFlight, positions: Positions) -> None:
        """Handle an acknowledged append."""

    def report_applied(self) -> None:
        """Make the calls of `reports` that are due; all of them once the topic is not followed."""
        at = None if self.followed is None else self.followed.buffer.applied
        while self.reports and (self.followed is None or (at is not None and self.reports[0][0] <= at)):
            self.reports.popleft()[1]()

    def refusal(self) -> Error:
        """The error for a transaction that writes to this topic."""
        return self.problem or UnregisteredTopic(
            f"topic {self.name!r} is not registered: register it before the first record of a transaction"
        )

    def take(self, most: int = sys.maxsize) -> AppendInFlight:
        """Take what can be appended now in one batch, of at most so many parts; the queue must not be empty."""
        parts: list[AppendPart] = []
        size, rows, names = 0, 0, set[str]()
        while self.waiting and len(parts) < most:
            part = self.waiting[0]
            size, rows = size + part.size, rows + part.rows
            names.update(part.batch.properties)
            if parts and (size + CELL_BYTES * len(names) * rows > FLIGHT_BYTES or len(names) > MAX_PROPERTIES):
                break
            parts.append(self.waiting.popleft())
        return as_flight((self, parts, Batch.concat([*map(_batch, parts)])))


@dataclass(eq=False)
class Appends(ABC):
    """Queues appends until a turn of the loop has collected them.

    `wake` schedules a turn of the loop. A thread that completes an append schedules it by `waker`, which saves an
    iteration of the event loop.

    A topic is notified of each append that is durable or failed on the loop, in order.
    """

    _loop: asyncio.AbstractEventLoop
    _wake: Callable[[], None]
    _waker: Waker
    failure: Error | None = None
    waiting_bytes: int = 0
    queued_bytes: int = 0
    """The size of what is queued for the next unit."""
    forms_units: ClassVar[bool] = False
    _ready: dict[ServiceTopic, None] = field(default_factory=dict)

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing is queued or in flight, but for what waits until it may be appended."""

    @property
    @abstractmethod
    def age(self) -> float:
        """Seconds since the oldest part was queued that could be durable by now; topics that are held do not count."""

    @abstractmethod
    def flush(self) -> None:
        """Append what is queued, as far as more may be in flight."""

    @abstractmethod
    def complete(self) -> None:
        """Report what was acknowledged or failed since the last call."""

    def add(self, topic: ServiceTopic, part: AppendPart) -> None:
        """Queue a part; it fails immediately if its topic, or every append, has failed."""
        problem = topic.problem or self.failure
        if problem is not None:
            part.failed(problem)
            return
        part.since = self._loop.time()
        self.waiting_bytes += part.size
        topic.waiting.append(part)
        if topic.held:
            topic.open_writer()
            return
        self._ready[topic] = None
        if self.forms_units:
            topic.formed = len(topic.waiting)
            self.queued_bytes += part.size

    def release(self, topic: ServiceTopic) -> None:
        """Resume the appends of a held topic."""
        topic.held = False
        if topic.waiting:
            self._ready[topic] = None
            self._wake()

    def fail(self, topic: ServiceTopic, error: Error) -> None:
        """Stop a topic with an error: fail what is queued and everything added later."""
        topic.problem = error
        self._ready.pop(topic, None)
        while topic.waiting:
            self._failed(topic.waiting.popleft(), error)

    def _flight_durable(self, flight: AppendInFlight, positions: Positions) -> None:
        topic = flight.topic
        topic.durable(flight, positions)
        for part in flight.parts:
            self.waiting_bytes -= part.size
            part.acknowledged()
        if topic.problem is not None:
            self.fail(topic, topic.problem)

    def _flight_failed(self, flight: AppendInFlight, error: Error) -> None:
        if flight.topic.writer_failed(error):
            self.failure = error
            if not isinstance(error, DiskFailed):
                return  # the clients get no answer, and repeat their requests at the next owner of the log
        for part in flight.parts:
            self._failed(part, error)

    def _failed(self, part: AppendPart, error: Error) -> None:
        self.waiting_bytes -= part.size
        part.failed(error)


MAX_IN_FLIGHT = 2


@dataclass(eq=False)
class TopicAppends(Appends):
    """Appends to each topic by itself, with at most `MAX_IN_FLIGHT` appends in flight."""

    _under_way: int = 0
    _in_flight: dict[ServiceTopic, None] = field(default_factory=dict)
    _completed: deque[tuple[AppendInFlight, Future[Positions]]] = field(default_factory=deque)
    _markers_due: bool = False

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._ready

    @property
    def age(self) -> float:
        oldest = now = self._loop.time()
        for topic in (*self._in_flight, *self._ready):
            if topic.flights:
                oldest = min(oldest, topic.flights[0].parts[0].since)
            elif topic.waiting:
                oldest = min(oldest, topic.waiting[0].since)
        return now - oldest

    def flush(self) -> None:
        ready, self._ready = self._ready, {}
        for topic in ready:
            if topic.deferred:
                self._ready[topic] = None
            else:
                self._append(topic)
        if self._ready and not self._markers_due:
            self._markers_due = True
            self._loop.call_soon(self._flush_markers)

    def _flush_markers(self) -> None:
        self._markers_due = False
        ready, self._ready = self._ready, {}
        try:
            for topic in ready:
                self._append(topic)
        except Exception as error:  # the failure ends the engine
            self.failure = self.failure or Error(f"unexpected: {error!r}")
            self._wake()
            raise

    def complete(self) -> None:
        while self._completed:
            flight, future = self._completed.popleft()
            topic = flight.topic
            topic.flights.popleft()
            self._under_way -= 1
            if not topic.flights:
                self._in_flight.pop(topic, None)
            if topic.waiting and not topic.held:
                self._ready[topic] = None
            error = future.exception()
            if error is None:
                self._flight_durable(flight, future.result())
            else:
                self._flight_failed(flight, as_error(error))

    def _append(self, topic: ServiceTopic) -> None:
        """Append what is queued for a topic, in as many appends as may be in flight."""
        while topic.waiting and not topic.held and len(topic.flights) < MAX_IN_FLIGHT:
            flight, writer = topic.take(), _writer(topic)
            try:
                future = writer.append(flight.batch)
            except Error as error:
                self._flight_failed(flight, error)
                continue
            topic.flights.append(flight)
            self._in_flight[topic] = None
            self._under_way += 1
            future.add_done_callback(partial(self._on_append, flight))

    def _on_append(self, flight: AppendInFlight, future: Future[Positions]) -> None:
        self._completed.append((flight, future))
        self._waker.wake()


UNIT_BYTES = 1024 * 1024
"""Bytes of a unit, approximately, after which no more frames are handled before it is on its way."""
BACKLOG_BYTES = 4 * 1024 * 1024
"""Bytes of a unit, approximately, to which no more is added of what topics were held with."""
PAUSE = 0.5
"""Seconds until a unit is written again for which a nearly full disk has no room."""
REFUSALS = (DiskWatermark, TooManyFiles)
"""Errors after which nothing of a unit was written, and which may pass."""


class Unit(NamedTuple):
    """A unit in flight."""

    number: int
    flights: list[AppendInFlight]


class UnitAppends(Appends):
    """Appends everything that is queued for topics that are not held as one unit: all of it is durable, or nothing.

    `number` is that of the unit that is being formed; units become durable in this order, up to `durable` by now.
    What can be refused is refused before it is queued: `refusal` says why no record is taken now. A unit for which
    there is no room waits, and all after it. `decisions`, the topic of the decision log, is reported first: the buffers
    then meet no marker whose decision is not known to be durable.
    """

    forms_units = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        waker: Waker,
        broker: AtomicBroker,
        decisions: ServiceTopic,
    ) -> None:
        super().__init__(loop, wake, waker)
        self.number, self.durable = 1, 0
        self._broker = broker
        self._decisions = decisions
        self._unit: Unit | None = None
        """The unit in flight: one at a time, so that none is written that follows a refused one."""
        self._result: TogetherResult | None = None
        """What became of the unit in flight, once that is known."""
        self._again: Unit | None = None
        """The unit that was refused."""
        self._refused_by: Error | None = None
        """Why the last unit was refused."""
        self._paused = False
        self._wait: Wait | None = None

    @property
    def idle(self) -> bool:
        return self._unit is None and (self._paused or not (self._again or self._ready))

    @property
    def full(self) -> bool:
        """Whether enough is queued for the next unit."""
        return self.queued_bytes >= UNIT_BYTES

    @property
    def may_append(self) -> bool:
        """Whether the next unit is written at the end of this turn."""
        return self._unit is None and not self._paused

    @property
    def refusal(self) -> Error | None:
        """Why records are refused now: the disk is nearly full."""
        return self._refused_by or self._broker.space_refusal()

    @property
    def age(self) -> float:
        now = self._loop.time()
        if self._unit is not None:
            return now - self._unit.flights[0].parts[0].since
        return now - min([topic.waiting[0].since for topic in self._ready if topic.waiting], default=now)

    def fail(self, topic: ServiceTopic, error: Error) -> None:
        formed = [topic.waiting.popleft() for _ in range(topic.formed)]
        super().fail(topic, error)
        if formed:
            topic.waiting.extend(formed)
            self._ready[topic] = None

    def release(self, topic: ServiceTopic) -> None:
        topic.backlog = bool(topic.waiting)
        super().release(topic)

    def flush(self) -> None:
        """Append what was refused, or else as one unit what is queued; a large backlog in pieces."""
        if self._unit is not None or self._paused:
            return
        if self._again is not None:
            unit, self._again = self._again, None
            self._submit(unit)
        elif self._ready and (flights := self._formed()):
            self._submit(Unit(self.number, flights))
            self.number += 1

    def _formed(self) -> list[AppendInFlight]:
        """Take what the next unit holds."""
        ready, self._ready = self._ready, {}
        flights: list[AppendInFlight] = []
        size, self.queued_bytes = self.queued_bytes, 0
        for topic in ready:
            while topic.formed if topic.held or topic.problem else topic.waiting:
                if topic.backlog and size > BACKLOG_BYTES and flights:
                    self._ready[topic] = None
                    break
                flight = topic.take(topic.formed) if topic.held else topic.take()
                topic.formed = max(topic.formed - len(flight.parts), 0)
                flights.append(flight)
                topic.flights.append(flight)
                if topic.backlog:
                    size += sum([part.size for part in flight.parts])
            topic.backlog = topic.backlog and bool(topic.waiting)
        return flights

    def _submit(self, unit: Unit) -> None:
        self._unit = unit
        try:
            self._broker.append_together(
                [(_writer(flight.topic), flight.batch) for flight in unit.flights], self._on_unit
            )
        except Error as error:
            self._on_unit(error)

    def _on_unit(self, result: TogetherResult) -> None:
        self._result = result
        self._waker.wake()

    def complete(self) -> None:
        """Report the unit in flight if it is durable, or was refused."""
        unit, result = self._unit, self._result
        if unit is None or result is None:
            return
        self._unit = self._result = None
        if isinstance(result, list):
            self.durable = unit.number
            self._durable_unit(unit.flights, result)
        elif isinstance(result, REFUSALS):
            self._refused(unit, result)
        else:
            self._failed_unit(unit.flights, as_error(result))

    def _durable_unit(self, flights: list[AppendInFlight], results: list[Positions | Error]) -> None:
        if self._wait is not None:
            waits.end(self._wait)
            self._wait = self._refused_by = None
        for decisions in (True, False):
            for flight, result in zip(flights, results, strict=True):
                if (flight.topic is self._decisions) is not decisions:
                    continue
                flight.topic.flights.popleft()
                if isinstance(result, Error):
                    self._flight_failed(flight, result)
                else:
                    self._flight_durable(flight, result)

    def _failed_unit(self, flights: list[AppendInFlight], error: Error) -> None:
        """Nobody knows whether a unit is durable: the engine ends, and the next owner of the log reads what it has.

        Clients repeat their requests there; those of a log that has stopped get its error.
        """
        self.failure = self.failure or error
        for flight in flights if isinstance(error, DiskFailed) else ():
            for part in flight.parts:
                self._failed(part, error)

    def _refused(self, unit: Unit, error: Error) -> None:
        """Nothing of a unit was written: write it again later, before all that follows."""
        self._again, self._paused, self._refused_by = unit, True, error
        self._loop.call_later(PAUSE, self._retry)
        self._wait = self._wait or waits.begin("space for the log")
        self._wait.failed(error)

    def _retry(self) -> None:
        self._paused = False
        self._wake()


def _writer(topic: ServiceTopic) -> Writer:
    if topic.writer is None:
        raise AssertionError(f"topic {topic.name} was released without a writer")
    return topic.writer
