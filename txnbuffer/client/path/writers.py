"""The writers of a client that writes to a cluster itself, its ordinary sends, and the record path of its sessions

Each topic has a writer, which is opened when first needed and closed with the client. Record sets are written by a
second writer without batching. The client waits for all appends of one before it uses the other, so that the topic gets
them in order. The futures of appends complete in other threads; many of them wake the loop once. A writer whose append
failed is closed: its appends in flight fail, and a new writer opens only after all of them are settled, so that nothing
is reordered.

Ordinary sends need no service. The records of transactions take the `DirectPath`, and the service gets all other
requests of the session. An append belongs to no connection: it is neither lost with one nor repeated over the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from broker_io.batch import Batch
from broker_io.environment import current
from broker_io.errors import EntryTooLarge, Error, MessageTooLarge, ServiceUnavailable, TopicNotFound, as_error
from broker_io.port import MAX_MESSAGE_BYTES, Broker, Writer
from broker_io.position import Positions
from broker_io.waits import Backoff, Waker
from txnbuffer.client.lifecycle import cancel, check_loop
from txnbuffer.client.path.record_path import (
    MAX_IN_FLIGHT,
    RecordPath,
    SendInFlight,
    SendResult,
    SendTopic,
    count_unsent,
    send_unknown,
)
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.protocol import RECORDS
from txnbuffer.rpc.discovery import check_creatable
from txnbuffer.rpc.frames import Send, ServerFrame

MAX_IN_FLIGHT_MESSAGES = 3_000
"""Maximum messages in flight of a topic; others wait here, because a writer with a full queue blocks the loop."""
SLICE = 500
"""Messages that are passed to a writer before the loop runs other tasks."""
THREADS = 8
"""Maximum number of writers that are opened or closed concurrently."""
CLOSE_TIMEOUT = 5.0
"""Seconds that `close` waits for appends in flight."""
CLOSE_POLL = 0.01

Settled = Callable[[Error | None], None]


@dataclass(slots=True)
class TopicAppend:
    """Messages for one topic. `settled` is called once on the loop: with None when they are durable, or with an error.

    `creates`: create the topic if it is missing. `at`: how many messages the writer has; `slices` are in flight.
    """

    batch: Batch
    settled: Settled
    creates: bool
    at: int = 0
    slices: int = 0
    error: Error | None = None

    @property
    def alone(self) -> bool:
        """Whether the messages are record sets, which are not batched."""
        return RECORDS in self.batch.properties

    def next_slice(self, suspect: int | None) -> Batch:
        """Return the next messages for the writer; a message of `suspect` bytes or more is returned alone."""
        first, self.at = self.at, min(self.at + SLICE, len(self.batch))
        if suspect is not None and self.at - first > 1:
            large = (self.batch.take(slice(first, self.at)).sizes() >= suspect).nonzero()[0]
            if len(large):
                self.at = first + max(int(large[0]), 1)
        return self.batch if self.at - first == len(self.batch) else self.batch.take(slice(first, self.at))

    def failed(self, error: Error) -> None:
        """Keep the first error. If one of several messages was too large, report EntryTooLarge, as others may fit."""
        if isinstance(error, MessageTooLarge) and len(self.batch) > 1:
            error = EntryTooLarge(f"one of {len(self.batch)} messages that were sent together was rejected ({error})")
        self.error = self.error or error

    @property
    def passed_on(self) -> bool:
        return self.error is not None or self.at == len(self.batch)

    def settle(self) -> None:
        """Report the result once no slice is in flight."""
        if self.passed_on and not self.slices:
            self.settled(self.error)


@dataclass(slots=True, eq=False)
class TopicWriter:
    """The writers and waiting appends of one topic.

    - `alone`: whether `writer` is the one for record sets. `other` is the other writer.
    - `in_flight`: messages that the writer has not settled.
    - `failed_writers`: writers to close. No new writer opens before the loop time `not_before`.
    - `scheduled`: `_pass_on` runs in the next iteration of the loop.
    - `suspect`: messages of at least this many bytes may be too large for the cluster.
    """

    name: str
    waiting: deque[TopicAppend] = field(default_factory=deque)
    alone: bool = False
    writer: Writer | None = None
    other: Writer | None = None
    failed_writers: list[Writer] = field(default_factory=list)
    opening: bool = False
    scheduled: bool = False
    in_flight: int = 0
    suspect: int | None = None
    failures: int = 0
    not_before: float = 0.0

    def turn(self) -> None:
        """Use the other writer."""
        self.alone = not self.alone
        self.writer, self.other = self.other, self.writer


class Writers:
    """The writers of a client. If a topic cannot be opened for `max_unavailable` seconds, its appends fail."""

    def __init__(self, broker: Broker, max_unavailable: float) -> None:
        self._broker = broker
        self._max_unavailable = max_unavailable
        self._loop = asyncio.get_running_loop()
        self._executor = current().threads.executor(THREADS, "txnbuffer-writers")
        self._topics: dict[str, TopicWriter] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._done: deque[tuple[TopicWriter, TopicAppend, Batch, Future[Positions]]] = deque()
        self._waker = Waker(self._loop, self._take_done)
        self._idle = asyncio.Event()
        self._unsettled = 0
        self._closed: Error | None = None
        self._backoff = Backoff()

    def append(self, name: str, batch: Batch, settled: Settled, *, creates: bool = False) -> None:
        """Append messages; `settled` may be called before this returns.

        `creates`: create the topic if it is missing and the service allows that.
        """
        if self._closed is not None:
            settled(self._closed)
            return
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = TopicWriter(name)
        topic.waiting.append(TopicAppend(batch, self._counted(settled), creates))
        if not topic.scheduled:
            self._pass_on(topic)

    async def close_topic(self, name: str) -> None:
        """Close the writers of a topic once nothing is in flight; the next append opens another one."""
        topic = self._topics.get(name)
        if topic is None:
            return
        while topic.waiting or topic.in_flight or topic.opening:
            await asyncio.sleep(CLOSE_POLL)
        opened = [one for one in (topic.writer, topic.other, *topic.failed_writers) if one is not None]
        topic.writer = topic.other = None
        topic.failed_writers = []
        await asyncio.gather(*(self._loop.run_in_executor(self._executor, _close, one) for one in opened))

    async def close(self, error: Error) -> None:
        """Wait up to CLOSE_TIMEOUT for appends in flight, then close the writers; later appends fail with `error`."""
        if self._unsettled:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), CLOSE_TIMEOUT)
        self._closed = error
        await cancel(*self._tasks)
        topics = [*self._topics.values()]
        for topic in topics:
            self._fail_waiting(topic, error)
        kept = [writer for topic in topics for writer in (topic.writer, topic.other, *topic.failed_writers)]
        opened = [writer for writer in kept if writer is not None]
        await asyncio.gather(*(self._loop.run_in_executor(self._executor, _close, writer) for writer in opened))
        self._executor.shutdown(wait=False)

    def _counted(self, settled: Settled) -> Settled:
        self._unsettled += 1

        def count(error: Error | None) -> None:
            self._unsettled -= 1
            if not self._unsettled:
                self._idle.set()
            settled(error)

        return count

    # Passing messages to the writers

    def _pass_on(self, topic: TopicWriter) -> None:
        """Pass waiting messages to the writer, up to the limit of messages in flight."""
        topic.scheduled = False
        handed = 0
        while topic.waiting and topic.in_flight < MAX_IN_FLIGHT_MESSAGES:
            if topic.waiting[0].alone != topic.alone:
                if topic.in_flight or topic.opening:
                    return
                topic.turn()
            if topic.writer is None:
                self._reopen(topic)
                return
            if handed >= SLICE:
                topic.scheduled = True
                self._loop.call_soon(self._pass_on, topic)
                return
            append = topic.waiting[0]
            batch = append.next_slice(topic.suspect)
            try:
                future = topic.writer.append(batch)
            except Exception as error:  # the slice was not written, and the writer is still usable
                append.failed(as_error(error))
            else:
                append.slices += 1
                topic.in_flight += len(batch)
                future.add_done_callback(partial(self._on_done, topic, append, batch))
            handed += len(batch)
            if append.passed_on:
                topic.waiting.popleft()
                append.settle()

    def _on_done(self, topic: TopicWriter, append: TopicAppend, batch: Batch, future: Future[Positions]) -> None:
        """Queue a completed future. Called in any thread."""
        self._done.append((topic, append, batch, future))
        self._waker.wake()

    def _take_done(self) -> None:
        touched: dict[TopicWriter, None] = {}
        while self._done:
            topic, append, batch, future = self._done.popleft()
            topic.in_flight -= len(batch)
            append.slices -= 1
            if (error := future.exception()) is not None:
                if isinstance(error, EntryTooLarge):
                    topic.suspect = min(topic.suspect or MAX_MESSAGE_BYTES, int(batch.sizes().max()))
                append.failed(as_error(error))
                self._give_up(topic)
                if topic.waiting and topic.waiting[0] is append:
                    topic.waiting.popleft()
            else:
                topic.failures = 0
            append.settle()
            touched[topic] = None
        for topic in touched:
            if topic.waiting and not topic.scheduled:
                self._pass_on(topic)

    # Opening

    def _give_up(self, topic: TopicWriter) -> None:
        """Stop using both writers of a topic: an error of one would occur on the other as well."""
        if topic.writer is not None:
            topic.failed_writers += [writer for writer in (topic.writer, topic.other) if writer is not None]
            topic.writer = topic.other = None
            self._pause(topic)

    def _pause(self, topic: TopicWriter) -> None:
        topic.failures += 1
        topic.not_before = self._loop.time() + self._backoff.after(topic.failures)

    def _reopen(self, topic: TopicWriter) -> None:
        """Open a new writer if nothing of the previous one is in flight."""
        if not topic.opening and not topic.in_flight and topic.waiting and self._closed is None:
            topic.opening = True
            task = self._loop.create_task(self._open(topic))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _open(self, topic: TopicWriter) -> None:
        give_up_at = self._loop.time() + self._max_unavailable
        try:
            while topic.writer is None:
                await asyncio.sleep(topic.not_before - self._loop.time())
                creates = any(append.creates for append in topic.waiting)
                failed_writers, topic.failed_writers = topic.failed_writers, []
                work = partial(_open, self._broker, topic.name, failed_writers, creates=creates, alone=topic.alone)
                try:
                    topic.writer = await self._loop.run_in_executor(self._executor, work)
                except Exception as error:
                    named = as_error(error)
                    self._pause(topic)
                    if not named.retryable or self._loop.time() >= give_up_at:
                        topic.opening = False
                        self._fail_waiting(topic, named)
                        return
        except asyncio.CancelledError:  # perhaps not by `close`: nobody else would open a writer for what waits
            topic.opening = False
            self._fail_waiting(topic, self._closed or ServiceUnavailable(f"opening topic {topic.name!r} was cancelled"))
            raise
        finally:
            topic.opening = False
        self._pass_on(topic)

    def _fail_waiting(self, topic: TopicWriter, error: Error) -> None:
        waiting = [*topic.waiting]
        topic.waiting.clear()
        for append in waiting:
            append.error = append.error or error
            append.settle()


def _open(broker: Broker, name: str, failed_writers: list[Writer], *, creates: bool, alone: bool) -> Writer:
    for writer in failed_writers:
        _close(writer)
    try:
        return broker.writer(name, unbatched=alone)
    except TopicNotFound:
        if not creates:
            raise
        check_creatable(broker, name)
        broker.create_topic(name)
        return broker.writer(name, unbatched=alone)


def _close(writer: Writer) -> None:
    with contextlib.suppress(Error):  # its appends reported their errors
        writer.close()


class OrdinarySends:
    """Ordinary sends to a cluster. The records that tasks send to a topic in one iteration of the loop are appended
    together.
    """

    def __init__(self, writers: Writers, broker: Broker) -> None:
        self._broker = broker
        self._writers = writers
        self._path = DirectPath(writers, 0, self._deliver)
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._for_room: deque[asyncio.Future[None]] = deque()

    @property
    def max_message_bytes(self) -> int:
        """The cluster's size limit of a message in bytes, as far as it is known."""
        return self._broker.max_message_bytes

    async def close_topic(self, topic: str) -> None:
        """Close the writers of a topic that is going to be deleted: they would create it again."""
        await self._writers.close_topic(topic)

    async def send(self, topic: str, rows: SendColumns) -> None:
        """Send records; return when they are durable. Raises SendUnknown if they may or may not be in the log."""
        check_loop(self._loop)
        while self._path.room <= 0:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._for_room.append(waiter)
            await waiter
        done: asyncio.Future[None] = self._loop.create_future()
        self._path.add(self._path.topic(topic), rows, None, done)
        self._schedule()
        await done

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self._path.take()

    def _deliver(self) -> None:
        for flight, error, _, _ in self._path.take_results():
            for waiter in flight.waiters:
                if waiter.done():
                    continue
                if error is None:
                    waiter.set_result(None)
                elif error.retryable:  # a retry may duplicate the records
                    waiter.set_exception(send_unknown(flight.send.topic, error))
                else:
                    waiter.set_exception(error)
        while self._for_room and self._path.room > 0:
            waiter = self._for_room.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self._schedule()


CREDITS = 8 * 1024 * 1024
"""Limit of the unacknowledged bytes of a path."""


class DirectPath(RecordPath):
    """Appends to a cluster by `writers`; topics do not wait for one another.

    `notify` is called on the loop when there are results. `max_message_bytes` is the cluster's limit.
    """

    through_service = False

    def __init__(self, writers: Writers, max_message_bytes: int, notify: Callable[[], None]) -> None:
        super().__init__(CREDITS)
        self._writers = writers
        self._max_message_bytes = max_message_bytes
        self._notify = notify
        self._in_flight: dict[int, SendInFlight] = {}

    def take(self) -> tuple[Send, ...]:
        while (flight := self._next()) is not None:
            self._in_flight[id(flight)] = flight
            count_unsent(flight, -1)
            settled = partial(self._settled, flight)
            self._writers.append(flight.send.topic, flight.send.batch, settled, creates=not flight.runs)
        return ()

    def receive(self, frame: ServerFrame) -> None:
        """The service gets no records, so it says nothing about them."""

    def limit(self, max_message_bytes: int) -> int:
        return min(max_message_bytes or self._max_message_bytes, self._max_message_bytes)

    def lost(self) -> list[SendInFlight]:
        return []

    def _drop_in_flight(self) -> Iterable[SendInFlight]:
        dropped = [*self._in_flight.values()]
        self._in_flight.clear()
        return dropped

    def _may_send(self, topic: SendTopic) -> bool:
        return topic.in_flight < MAX_IN_FLIGHT or not topic.has_transactional  # each ordinary send is waited for

    def _settled(self, flight: SendInFlight, error: Error | None) -> None:
        if self._in_flight.pop(id(flight), None) is not None:  # else it was dropped
            self._settle(flight)
            self._results.append(SendResult(flight, error))
            self._notify()
