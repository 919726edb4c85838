"""Appends of all topics: collected during a turn of the loop, written in groups, reported in order.

A topic has at most `MAX_IN_FLIGHT` appends in flight: while one is synced the next one fills, so a slower disk gets
larger groups. Futures complete in other threads, which wake the loop once for many appends.

In cluster mode only markers are appended, and no client waits for them: the answers of a turn are sent first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from broker_io import waits
from broker_io.errors import DiskFailed, DiskWatermark, Error
from broker_io.port import ReservingWriter, Writer
from broker_io.position import Positions
from txnbuffer.service.topic import AppendInFlight, AppendPart, ServiceTopic

MAX_IN_FLIGHT = 2
MAX_WAIT = 0.5
"""Seconds until an append that a nearly full disk rejected is retried."""

Acknowledged = Callable[[ServiceTopic, AppendInFlight, Positions], None]
WriterFailed = Callable[[ServiceTopic, Error], None]


class Appends:
    """Queues and writes appends.

    `acknowledged` is called on the loop for each append, in order within a topic; `wake` schedules a turn of the loop.
    `writer_failed` is called when the writer of a topic in cluster mode has failed, which affects no other topic.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        acknowledged: Acknowledged,
        wake: Callable[[], None],
        writer_failed: WriterFailed | None = None,
    ) -> None:
        self._writer_failed = writer_failed
        self.failure: Error | None = None
        self.waiting_bytes = 0
        self._loop = loop
        self._acknowledged = acknowledged
        self._wake = wake
        self._ready: dict[ServiceTopic, None] = {}
        self._under_way = 0
        self._completed: deque[tuple[ServiceTopic, AppendInFlight, Future[Positions]]] = deque()
        self._woken = False
        self._markers_due = False

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._ready

    def add(self, topic: ServiceTopic, part: AppendPart) -> None:
        """Queue a part; it fails immediately if its topic, or every append, has failed."""
        problem = topic.problem or self.failure
        if problem is not None:
            part.failed(problem)
            return
        self.waiting_bytes += part.size
        topic.waiting.append(part)
        if not topic.held:
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
            if topic.shared:
                self._ready[topic] = None
            else:
                self._append_waiting(topic)
        if self._ready and not self._markers_due:
            self._markers_due = True
            self._loop.call_soon(self._flush_markers)

    def _flush_markers(self) -> None:
        self._markers_due = False
        ready, self._ready = self._ready, {}
        try:
            for topic in ready:
                self._append_waiting(topic)
        except Exception as error:  # it ends the engine
            self.failure = self.failure or Error(f"unexpected: {error!r}")
            self._wake()
            raise

    def _append_waiting(self, topic: ServiceTopic) -> None:
        while topic.waiting and not topic.held and len(topic.flights) < MAX_IN_FLIGHT:
            self._append(topic)

    def complete(self) -> None:
        """Report every append that was acknowledged or failed since the last call."""
        self._woken = False
        while self._completed:
            topic, flight, future = self._completed.popleft()
            topic.flights.popleft()
            self._under_way -= 1
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
        flight = topic.take()
        if topic.writer is None:
            raise AssertionError(f"topic {topic.name} was released without a writer")
        try:
            future = _append_to(topic.writer, flight)
        except Error as error:
            self._flight_failed(topic, flight, error)
            return
        topic.flights.append(flight)
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
        self._acknowledged(topic, flight, positions)
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
        if self._writer_failed is not None and topic.shared:
            self._writer_failed(topic, error)
        elif isinstance(error, DiskFailed):
            self.failure = error
        for part in flight.parts:
            self._failed(part, error)

    def _failed(self, part: AppendPart, error: Error) -> None:
        self.waiting_bytes -= part.size
        part.failed(error)


def _append_to(writer: Writer, flight: AppendInFlight) -> Future[Positions]:
    if flight.reserved and isinstance(writer, ReservingWriter):
        return writer.append_reserved(flight.batch)
    return writer.append(flight.batch)
