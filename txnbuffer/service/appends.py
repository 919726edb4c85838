"""Appends of all topics: collected for a turn of the loop, written together, told of in order.

A topic has at most `FLIGHTS` appends under way: while one is being synced the next one fills, so groups are
as large as the disk is slow. Futures are done in other threads; the loop is woken once for many.

To shared topics only markers are appended, which nobody waits for: the answers of a turn go out before them.
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

FLIGHTS = 2
MAX_WAIT = 0.5
"""Seconds until what a nearly full disk refused is tried again."""

Acknowledged = Callable[[ServiceTopic, AppendInFlight, Positions], None]
Died = Callable[[ServiceTopic, Error], None]


class Appends:
    """`acknowledged` is called on the loop for each append, those of a topic in order; `wake` makes a turn of the loop.

    `died` is told when the writer of a shared topic has failed, which ends nothing else.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        acknowledged: Acknowledged,
        wake: Callable[[], None],
        died: Died | None = None,
    ) -> None:
        self._died = died
        self.failure: Error | None = None
        self.waiting_bytes = 0
        self._loop = loop
        self._acknowledged = acknowledged
        self._wake = wake
        self._ready: dict[ServiceTopic, None] = {}
        self._under_way = 0
        self._done: deque[tuple[ServiceTopic, AppendInFlight, Future[Positions]]] = deque()
        self._woken = False
        self._markers_due = False

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._ready

    def add(self, topic: ServiceTopic, part: AppendPart) -> None:
        """Queue something; it fails at once where nothing can be appended any more."""
        problem = topic.problem or self.failure
        if problem is not None:
            part.failed(problem)
            return
        self.waiting_bytes += part.size
        topic.waiting.append(part)
        if not topic.held:
            self._ready[topic] = None

    def release(self, topic: ServiceTopic) -> None:
        """Append again what a topic held back."""
        topic.held = False
        if topic.waiting:
            self._ready[topic] = None
            self._wake()

    def fail(self, topic: ServiceTopic, error: Error) -> None:
        """Nothing can be appended to a topic any more."""
        topic.problem = error
        self._ready.pop(topic, None)
        while topic.waiting:
            self._failed(topic.waiting.popleft(), error)

    def flush(self) -> None:
        """Append what waits, of each topic that has not enough under way."""
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
        except Exception as error:  # whoever makes the turns ends with it
            self.failure = self.failure or Error(f"unexpected: {error!r}")
            self._wake()
            raise

    def _append_waiting(self, topic: ServiceTopic) -> None:
        while topic.waiting and not topic.held and len(topic.flights) < FLIGHTS:
            self._append(topic)

    def complete(self) -> None:
        """Tell of everything that was acknowledged or failed since the last call."""
        self._woken = False
        while self._done:
            topic, flight, future = self._done.popleft()
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
            raise AssertionError(f"topic {topic.name} is let go without a writer")
        try:
            future = _append_to(topic.writer, flight)
        except Error as error:
            self._flight_failed(topic, flight, error)
            return
        topic.flights.append(flight)
        self._under_way += 1
        future.add_done_callback(partial(self._tell, topic, flight))

    def _tell(self, topic: ServiceTopic, flight: AppendInFlight, future: Future[Positions]) -> None:
        """In whichever thread the future was done."""
        self._done.append((topic, flight, future))
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
        """The disk is nearly full and nothing was written: where order counts everything is tried again later.

        Elsewhere records fail, and what was appended with them is appended again without them.
        """
        if not topic.waits_for_space:
            if not flight.reserved:
                topic.low = True
                again = [part for part in flight.parts if part.reserved]
                topic.waiting.extendleft(reversed(again))
                flight = AppendInFlight([part for part in flight.parts if not part.reserved], flight.batch)
                self._ready[topic] = None
            self._flight_failed(topic, flight, error or DiskWatermark("the disk is nearly full"))
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
        if self._died is not None and topic.shared:
            self._died(topic, error)
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
