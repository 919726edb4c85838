"""Appends of all topics: checked, collected during a turn of the loop, written in groups, reported in order.

The transaction of each record that a client sends must be open and owned by the session, its sequence number must be
the next one, and its size must be allowed. A violation rejects the records of the transaction concerned; the rest of
the send is appended.

A topic has at most `MAX_IN_FLIGHT` appends in flight: while one is synced the next one fills, so a slower disk gets
larger groups. Futures complete in other threads, which wake the loop once for many appends.

In cluster mode only markers are appended to topics, and no client waits for them: the answers of a turn are sent first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from broker_io import waits
from broker_io.batch import Batch, Labels, Message
from broker_io.errors import DiskWatermark, Error, InvalidMessage, MessageTooLarge
from broker_io.port import MAX_PROPERTIES, ReservingWriter, Writer
from broker_io.position import Positions
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import MAX_LEAST, PROTOCOL_VERSION, TxnId
from txnbuffer.protocol import RESERVED, SEQ, TXN, VERSION, numbers, texts_equal, transaction_codes
from txnbuffer.service.connection import SessionConnection
from txnbuffer.service.topic import AppendInFlight, AppendPart, ServiceTopic

TRANSACTIONAL = {VERSION, TXN, SEQ}


class WrittenTopics:
    """The last sequence number that a transaction sent to each topic. `failed`: the error that forces an abort."""

    __slots__ = ("failed", "seqs")

    def __init__(self) -> None:
        self.seqs: dict[str, int] = {}
        self.failed: Error | None = None


class CheckedSend(NamedTuple):
    """`batch`: the records to append, None if there are none; `least`: the transactions in it."""

    batch: Batch | None
    least: list[int]
    failures: list[tuple[TxnId | None, Error]]


class Sends:
    """Checks sends. `written`: by `least`, the open transactions that have written since this process began."""

    def __init__(self, coordinator: Coordinator, max_message_bytes: int) -> None:
        self.written: dict[int, WrittenTopics] = {}
        self._coordinator = coordinator
        self._limit = max_message_bytes

    def check(self, session: str, topic: ServiceTopic, batch: Batch) -> CheckedSend:
        """Return which records of a send may be appended."""
        try:
            self._check_messages(batch)
            reserved = {name for name in batch.properties if name.startswith(RESERVED)}
            if not reserved:
                return CheckedSend(batch, [], [])
            return self._check_transactions(session, topic, batch, reserved)
        except Error as error:
            return CheckedSend(None, [], [(None, error)])

    def adopt(self, txn: TxnId, topics: list[tuple[str, int]]) -> None:
        """Continue an open transaction that wrote before this process began; `topics`: the last sequence numbers."""
        written = self.written.setdefault(txn.least, WrittenTopics())
        for topic, seq in topics:
            written.seqs.setdefault(topic, seq)

    def topics_of(self, txn: TxnId) -> tuple[str, ...]:
        written = self.written.get(txn.least)
        return () if written is None else tuple(written.seqs)

    def under_way(self, topic: ServiceTopic, least: int, highest: int) -> bool:
        """Whether a transaction has sent records after `highest`, the last one that the buffer has applied."""
        written = self.written.get(least)
        return written is not None and written.failed is None and written.seqs.get(topic.name, 0) > highest

    def fail(self, least: list[int], error: Error) -> None:
        """Record that records of these transactions were not appended."""
        for one in least:
            self.written.setdefault(one, WrittenTopics()).failed = error

    def sweep(self) -> None:
        """Forget transactions that have ended."""
        has_ended = self._coordinator.has_ended
        for least in [least for least in self.written if has_ended(least)]:
            del self.written[least]

    def _check_messages(self, batch: Batch) -> None:
        if len(batch.properties) > MAX_PROPERTIES:
            raise InvalidMessage(
                f"a send has {len(batch.properties)} different properties: use at most {MAX_PROPERTIES}"
            )
        if _upper_bound(batch) <= self._limit:
            return
        sizes = batch.sizes()
        largest = int(sizes.argmax())
        if sizes[largest] > self._limit:
            raise MessageTooLarge(
                f"message {largest} of the send has {sizes[largest]} bytes, the limit is {self._limit}: split it; "
                "nothing of the send was appended"
            )

    def _check_transactions(self, session: str, topic: ServiceTopic, batch: Batch, reserved: set[str]) -> CheckedSend:
        count = len(batch)
        if reserved != TRANSACTIONAL:
            strange = ", ".join(sorted(reserved ^ TRANSACTIONAL))
            raise InvalidRequest(f"properties that begin with {RESERVED} are reserved ({strange}): use other names")
        codes, table = transaction_codes(batch.properties[TXN], count)
        seqs = numbers(batch.properties[SEQ], count, MAX_LEAST)
        current = texts_equal(batch.properties[VERSION], count, str(PROTOCOL_VERSION))
        if not current.all() or int(seqs.min()) < 1 or int(codes.min()) < 0 or int(table.least[codes].min()) < 1:
            raise InvalidRequest(f"a send has an invalid {VERSION}, {TXN} or {SEQ}: give each record valid ones")
        if topic.followed is None:
            raise topic.refusal()
        begins = np.ones(count, np.bool_)
        begins[1:] = (codes[1:] != codes[:-1]) | (seqs[1:] != seqs[:-1] + 1)
        starts = np.flatnonzero(begins)
        sizes = np.diff(starts, append=count).tolist()
        rows = codes[starts]
        ids = map(TxnId, table.most[rows].tolist(), table.least[rows].tolist())
        slices = zip(ids, starts.tolist(), sizes, seqs[starts].tolist(), strict=True)
        return self._check_slices(session, topic, batch, [*slices])

    def _check_slices(
        self, session: str, topic: ServiceTopic, batch: Batch, slices: list[tuple[TxnId, int, int, int]]
    ) -> CheckedSend:
        """`slices`: transaction, first row, number of rows, first sequence number."""
        refusal, all_written, name = self._coordinator.refusal, self.written, topic.name
        dropped: list[tuple[int, int]] = []
        failures: dict[TxnId, Error] = {}
        accepted: list[int] = []
        for txn, start, size, seq in slices:
            least = txn.least
            error = refusal(session, txn)
            if error is None:
                written = all_written.get(least)
                if written is None:
                    written = all_written[least] = WrittenTopics()
                last = written.seqs.get(name, 0)
                known = last - seq + 1
                if written.failed is not None:
                    error = written.failed
                elif known < 0:
                    text = f"transaction {txn} sent record {seq} to {name!r}, expected record {last + 1}: abort it"
                    error = written.failed = InvalidRequest(text)
                else:
                    if known > 0:
                        dropped.append((start, min(known, size)))
                    if known < size:
                        written.seqs[name] = seq + size - 1
                        accepted.append(least)
            if error is not None:
                failures[txn] = error
                dropped.append((start, size))
        if dropped:
            keep = np.ones(len(batch), np.bool_)
            for start, size in dropped:
                keep[start : start + size] = False
            batch = batch.take(keep)
        return CheckedSend(batch if len(batch) else None, accepted, [*failures.items()])


def _upper_bound(batch: Batch) -> int:
    """An upper bound on the size of each message; cheaper to compute than the sizes."""
    bound = len(batch.keys.data) + len(batch.values.data)
    for name, column in batch.properties.items():
        longest = max(map(len, column.values), default=0) if isinstance(column, Labels) else 20
        bound += 4 * (len(name) + longest)
    return bound


class SendPart:
    """Records of a client's send. `least`: their transactions."""

    __slots__ = ("_account", "_connection", "_least", "_number", "_sends", "batch", "size")

    reserved = False

    def __init__(
        self,
        batch: Batch,
        connection: SessionConnection,
        number: int,
        least: list[int],
        sends: Sends,
        account: UnsettledSends,
    ) -> None:
        self.batch = batch
        self.size = batch.weight
        self._connection = connection
        self._number = number
        self._least = least
        self._sends = sends
        self._account = account
        account.bytes += self.size
        connection.unsettled += self.size

    def acknowledged(self) -> None:
        self._account.bytes -= self.size
        self._account.records += len(self.batch)
        self._connection.settle(self._number, self.size)

    def failed(self, error: Error) -> None:
        self._account.bytes -= self.size
        self._sends.fail(self._least, error)
        self._connection.fail(self._number, error)
        self._connection.settle(self._number, self.size)


class UnsettledSends:
    """Clients' records: `bytes` that are not durable yet, and `records` that were appended."""

    __slots__ = ("bytes", "records")

    def __init__(self) -> None:
        self.bytes = 0
        self.records = 0


class MessagesPart:
    """Messages of the service: markers, decisions and messages to other shards."""

    __slots__ = ("_acknowledged", "_failed", "batch", "size")

    reserved = True

    def __init__(
        self, messages: Sequence[Message], acknowledged: Callable[[], None], failed: Callable[[Error], None]
    ) -> None:
        self.batch = Batch.of(messages)
        self.size = self.batch.weight
        self._acknowledged = acknowledged
        self._failed = failed

    def acknowledged(self) -> None:
        self._acknowledged()

    def failed(self, error: Error) -> None:
        self._failed(error)


MAX_IN_FLIGHT = 2
MAX_WAIT = 0.5
"""Seconds until an append that a nearly full disk rejected is retried."""


class Appends:
    """Queues and writes appends; `wake` schedules a turn of the loop.

    A topic is notified of each append that is durable or failed on the loop, in order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self.failure: Error | None = None
        self.waiting_bytes = 0
        self._loop = loop
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
            if topic.deferred:
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
        except Exception as error:  # the failure ends the engine
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
        for part in flight.parts:
            self._failed(part, error)

    def _failed(self, part: AppendPart, error: Error) -> None:
        self.waiting_bytes -= part.size
        part.failed(error)


def _append_to(writer: Writer, flight: AppendInFlight) -> Future[Positions]:
    if flight.reserved and isinstance(writer, ReservingWriter):
        return writer.append_reserved(flight.batch)
    return writer.append(flight.batch)
