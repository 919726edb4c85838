"""Appends of all topics: collected during a turn of the loop, written in groups, reported in order.

A topic has at most `MAX_IN_FLIGHT` appends in flight: while one is synced the next one fills, so a slower disk gets
larger groups. Futures complete in other threads, which wake the loop once for many appends.

In cluster mode only markers are appended to topics, and no client waits for them: the answers of a turn are sent first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from broker_io import waits
from broker_io.batch import Batch
from broker_io.errors import AppendUnknown, DiskFailed, DiskWatermark, Error, Fenced, NotLive, TopicNotFound
from broker_io.port import MAX_PROPERTIES, ReservingWriter, Writer
from broker_io.position import Position, Positions
from broker_io.waits import Wait
from txnbuffer.errors import UnregisteredTopic
from txnbuffer.model import TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.connection import CELL_BYTES
from txnbuffer.service.log_readers import LogReader

FLIGHT_BYTES = 8 * 1024 * 1024
"""Approximate maximum size of one append."""


@dataclass(slots=True, eq=False)
class AppendPart:
    """Messages to append, and the callbacks for the result; `size` is their approximate size in bytes.

    `reserved`: not a record; it may use the space that a nearly full disk keeps free.
    """

    batch: Batch
    acknowledged: Callable[[], None]
    failed: Callable[[Error], None]
    reserved: bool = True
    since: float = 0.0
    """When it was queued, by the time of the loop."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.batch.weight


class AppendInFlight(NamedTuple):
    """One append in flight: its parts, and all their messages in one batch."""

    parts: Sequence[AppendPart]
    batch: Batch
    reserved: bool = False


LOST_ROLE = Fenced | NotLive
"""Errors of a log that another process owns, or that this one has owned in between."""


class ServiceTopic:
    """One topic: its append queue, its appends in flight, and its buffer (`followed`, None without transactions).

    `held`: appends are suspended. `compacting`: a compaction reads its ledgers, which are not trimmed meanwhile.
    `problem`: the error that stopped the topic; `write_problem`: the error that blocks its writer for now.
    `waits_for_space`: appends that a nearly full disk rejects (`refused`) are retried in order instead of failing.
    `low`: the disk rejects records, so reserved messages are appended in batches of their own. `reader`: reads the
    topic if others write to it too. `deferred`: its appends wait until the answers of a turn were sent. `reports`:
    with a position, the calls to make once the buffer has applied the log up to it.
    """

    deferred = False

    def __init__(self, name: str, *, waits_for_space: bool = False) -> None:
        self.name = name
        self.waits_for_space = waits_for_space
        self.refused: list[AppendPart] = []
        self.low = False
        self.wait: Wait | None = None
        """The wait for disk space, while appends are refused."""
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
    def missing(self) -> bool:
        """Whether a temporary problem stopped it; then it is registered again."""
        return self.problem is not None and self.is_temporary(self.problem)

    @property
    def stopped(self) -> bool:
        """Whether it needs an operator; requests that the cluster did not answer are retried."""
        return self.problem is not None and not (self.missing and self.problem.retryable)

    @property
    def obstacle(self) -> Error | None:
        """The error that stops or delays this topic."""
        return self.problem or self.write_problem or (None if self.reader is None else self.reader.problem)

    @staticmethod
    def is_temporary(problem: Error) -> bool:
        """Whether a problem may go away: the topic was deleted."""
        return isinstance(problem, TopicNotFound)

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

    def take(self) -> AppendInFlight:
        """Take what can be appended now in one batch; the queue must not be empty."""
        parts: list[AppendPart] = []
        size, rows, names = 0, 0, set[str]()
        while self.waiting:
            part = self.waiting[0]
            size, rows = size + part.size, rows + len(part.batch)
            names.update(part.batch.properties)
            if parts and (size + CELL_BYTES * len(names) * rows > FLIGHT_BYTES or len(names) > MAX_PROPERTIES):
                break
            if parts and self.low and part.reserved != parts[0].reserved:
                break
            parts.append(self.waiting.popleft())
        return AppendInFlight(parts, Batch.concat([part.batch for part in parts]), self.low and parts[0].reserved)


MAX_IN_FLIGHT = 2
MAX_WAIT = 0.5
"""Seconds until an append that a nearly full disk rejected is retried."""


@dataclass(eq=False)
class Appends:
    """Queues and writes appends; `wake` schedules a turn of the loop.

    A topic is notified of each append that is durable or failed on the loop, in order.
    """

    _loop: asyncio.AbstractEventLoop
    _wake: Callable[[], None]
    failure: Error | None = None
    waiting_bytes: int = 0
    _ready: dict[ServiceTopic, None] = field(default_factory=dict)
    _under_way: int = 0
    _in_flight: dict[ServiceTopic, None] = field(default_factory=dict)
    _completed: deque[tuple[ServiceTopic, AppendInFlight, Future[Positions]]] = field(default_factory=deque)
    _woken: bool = False
    _markers_due: bool = False

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._ready

    @property
    def age(self) -> float:
        """Seconds since the oldest part was queued that could be durable by now; topics that are held do not count."""
        oldest = now = self._loop.time()
        for topic in (*self._in_flight, *self._ready):
            if topic.flights:
                oldest = min(oldest, topic.flights[0].parts[0].since)
            elif topic.waiting:
                oldest = min(oldest, topic.waiting[0].since)
        return now - oldest

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
        else:
            self._ready[topic] = None

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

    def flush(self) -> None:
        """Append what is queued, except for topics with `MAX_IN_FLIGHT` appends."""
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
        """Report every append that was acknowledged or failed since the last call."""
        self._woken = False
        while self._completed:
            topic, flight, future = self._completed.popleft()
            topic.flights.popleft()
            self._under_way -= 1
            if not topic.flights:
                self._in_flight.pop(topic, None)
            if topic.waiting and not topic.held:
                self._ready[topic] = None
            error = future.exception()
            if topic.refused or isinstance(error, DiskWatermark):
                self._refused(topic, flight, error)
            elif error is not None:
                self._flight_failed(topic, flight, error)
            else:
                self._flight_durable(topic, flight, future.result())

    def _append(self, topic: ServiceTopic) -> None:
        """Append what is queued for a topic, in as many appends as may be in flight."""
        while topic.waiting and not topic.held and len(topic.flights) < MAX_IN_FLIGHT:
            flight, writer = topic.take(), topic.writer
            if writer is None:
                raise AssertionError(f"topic {topic.name} was released without a writer")
            try:
                if flight.reserved and isinstance(writer, ReservingWriter):
                    future = writer.append_reserved(flight.batch)
                else:
                    future = writer.append(flight.batch)
            except Error as error:
                self._flight_failed(topic, flight, error)
                continue
            topic.flights.append(flight)
            self._in_flight[topic] = None
            self._under_way += 1
            future.add_done_callback(partial(self._on_done, topic, flight))

    def _on_done(self, topic: ServiceTopic, flight: AppendInFlight, future: Future[Positions]) -> None:
        """Called in the thread that completed the future."""
        self._completed.append((topic, flight, future))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _flight_durable(self, topic: ServiceTopic, flight: AppendInFlight, positions: Positions) -> None:
        topic.low = topic.low and flight.reserved
        if topic.wait is not None:
            waits.end(topic.wait)
            topic.wait = None
        topic.durable(flight, positions)
        for part in flight.parts:
            self.waiting_bytes -= part.size
            part.acknowledged()
        if topic.problem is not None:
            self.fail(topic, topic.problem)

    def _refused(self, topic: ServiceTopic, flight: AppendInFlight, error: BaseException | None) -> None:
        """The disk is nearly full and nothing was written: retry everything later where order matters.

        In other topics the records fail, and the reserved messages of the same append are queued again without them.
        """
        if not topic.waits_for_space:
            if not flight.reserved:
                topic.low = True
                again = [part for part in flight.parts if part.reserved]
                topic.waiting.extendleft(reversed(again))
                flight = AppendInFlight([part for part in flight.parts if not part.reserved], flight.batch)
                self._ready[topic] = None
            self._flight_failed(
                topic, flight, error or DiskWatermark("the disk is nearly full: free space or add some")
            )
            return
        if error is None:
            self._flight_failed(
                topic, AppendInFlight(topic.refused, flight.batch), Error("a later append overtook a refused one")
            )
            topic.refused = []
            return
        topic.held = True
        if topic.wait is None:
            topic.wait = waits.begin(f"space for topic {topic.name!r}")
        topic.wait.failed(error)
        topic.refused += flight.parts
        if not topic.flights:
            topic.waiting.extendleft(reversed(topic.refused))
            topic.refused = []
            self._loop.call_later(MAX_WAIT, self.release, topic)

    def _flight_failed(self, topic: ServiceTopic, flight: AppendInFlight, error: BaseException) -> None:
        if not isinstance(error, Error):
            error = Error(f"an append failed: {error!r}")
        if topic.writer_failed(error):
            self.failure = error
            if not isinstance(error, DiskFailed):
                return  # the clients get no answer, and repeat their requests at the next owner of the log
        for part in flight.parts:
            self._failed(part, error)

    def _failed(self, part: AppendPart, error: Error) -> None:
        self.waiting_bytes -= part.size
        part.failed(error)
