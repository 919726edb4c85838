"""Pulsar's client library in a simulated process: its Python interface, as far as the broker port uses it.

- A producer that loses its connection attaches again and resends what was not acknowledged: entries may be stored
  twice, and the acknowledged position is that of the second copy. Deduplication drops them and names no position.
- An exclusive producer holds its topic only while it is attached: after an unload another one may be first.
- A producer whose acknowledgements do not arrive sends again later, on another connection.
- Whoever is fenced learns it late; some of its last entries are stored, although it gets no acknowledgement.
- A reader that loses its connection continues after the last message that was taken, in whatever topic has the name
  then, and from the next message that exists. Sometimes it falls silent for ever, or gets nothing at first, as from a
  broker that has just come back under load.
- The callback of a reader may get its message late, while the queue has the next ones already.
- Whoever attaches to a topic that does not exist creates it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import _pulsar
import pulsar
from sim.cluster_topics import Entry, Place, Received, StoredTopic, size_of
from sim.threads import Signal, SimQueue

if TYPE_CHECKING:
    from sim.cluster import SimCluster
    from sim.world import Process

DELIVERED = 100
"""Messages that a reader gets at once, about."""
MAX_ENTRY = 5 * 1024 * 1024
SLOW_SECONDS = 10.0
"""Seconds for which a slow broker sends nothing to a reader that attaches, at most."""
CALLBACK_SECONDS = 2.0
"""Seconds after which a reader's slow callback is called, at most."""
GIVE_UP_SECONDS = 30.0
"""Seconds after which a producer whose acknowledgements do not arrive gives its connection up, at most."""
KILLED_IN_RESEND = 0.3
"""The probability that a process is killed while its producer sends again what a broken connection left open."""
CALL_SECONDS = 2e-5
"""Seconds that a call without an answer takes, so that a caller that asks again and again reaches its deadline."""
OK = pulsar.Result.Ok
Exclusive = (pulsar.ProducerAccessMode.Exclusive, pulsar.ProducerAccessMode.ExclusiveWithFencing)
T = TypeVar("T")


class SimClient:
    """A client of the library; one thread of its process calls all callbacks."""

    def __init__(self, cluster: SimCluster, process: Process, operation_timeout: float = 30.0) -> None:
        self.cluster = cluster
        self.process = process
        self.closed = False
        self._client = self  # what the Python wrapper of the library wraps
        self._timeout = operation_timeout
        self._calls: Any = SimQueue(cluster.world.scheduler)
        self._handles: dict[SimProducer | SimReader, None] = {}
        process.environment.threads.thread(self._serve, name="client library", daemon=True).start()

    def create_producer(self, topic: str, configuration: Any) -> SimProducer:
        return self._open(topic, lambda: SimProducer(self, local(topic), configuration))

    def create_reader(
        self,
        topic: str,
        start_message_id: Any,
        *,
        receiver_queue_size: int = 1000,
        subscription_role_prefix: str | None = None,
        is_read_compacted: bool = False,
        start_message_id_inclusive: bool = False,
    ) -> SimReader:
        found = start_message_id._msg_id
        start = (found.ledger_id(), found.entry_id(), found.batch_index())
        return self._open(
            topic,
            lambda: SimReader(
                self,
                local(topic),
                start,
                inclusive=start_message_id_inclusive,
                compacted=is_read_compacted,
                ahead=receiver_queue_size,
            ),
        )

    def close(self) -> None:
        if self.closed or self.cluster.world.closed:
            return
        self.closed = True
        for handle in [*self._handles]:
            handle.abandon()
        self._calls.put(None)

    def call(self, callback: Callable[[], object]) -> None:
        """Call something in the library's thread."""
        if not self.process.dead:
            self._calls.put(callback)

    def forget(self, handle: SimProducer | SimReader) -> None:
        """A producer or reader was closed."""
        self._handles.pop(handle, None)

    def _serve(self) -> None:
        while (callback := self._calls.get()) is not None:
            callback()

    def _open(self, topic: str, opening: Callable[[], T]) -> T:
        cluster, clock = self.cluster, self.process.clock
        give_up = clock.monotonic() + self._timeout
        while True:
            if self.closed:
                raise pulsar.AlreadyClosed("the client is closed")
            clock.sleep(cluster.delay())
            if cluster.serves(self.process, local(topic)):
                cluster.maybe_refuse()
                opened: Any = opening()
                clock.sleep(cluster.delay())
                if cluster.reachable(self.process) and not self.closed:
                    self._handles[opened] = None
                    found: T = opened
                    return found
                opened.abandon()
            if clock.monotonic() >= give_up:
                raise pulsar.Timeout(f"{topic} was not opened within {self._timeout:g} s")
            clock.sleep(cluster.random.uniform(0.1, 0.5))


def local(topic: str) -> str:
    """The name of a topic in the cluster."""
    return topic.removeprefix("persistent://")


class Send:
    """An entry that is not acknowledged yet."""

    __slots__ = ("batched", "callbacks", "messages", "sequence", "stored")

    def __init__(self, messages: list[Any], callbacks: list[Any], sequence: int, *, batched: bool) -> None:
        self.messages = messages
        self.callbacks = callbacks
        self.sequence = sequence
        self.batched = batched
        self.stored: Entry | None = None

    def answer(self, result: Any, ids: list[Any] | None = None) -> None:
        """Call the callbacks of all messages."""
        for index, callback in enumerate(self.callbacks):
            if callback is not None:
                callback(result, None if ids is None else ids[index])


class SimProducer:
    """A producer; it is attached to its topic while its connection stands."""

    def __init__(self, client: SimClient, name: str, configuration: Any) -> None:
        self.name = name
        self.client = client
        self._cluster = cluster = client.cluster
        self._scheduler = cluster.world.scheduler
        self._configuration = configuration
        self._mode = configuration.access_mode()
        self.exclusive = self._mode in Exclusive
        self._compressed = configuration.compression_type() != pulsar.CompressionType.NONE
        self._id = f"standalone-{cluster.new_id()}"
        self._sequence = 0
        self._batch: list[tuple[Any, Any]] = []
        self._batch_bytes = self._batch_number = 0
        self._pending: deque[Send] = deque()
        self._connection = 0
        self._last = [0.0, 0.0]
        self._dead: Any = None
        self._killed_in_resend = False
        self._settled = Signal(self._scheduler)
        self.topic = cluster.create(name)
        self._take()
        client.process.on_death.append(self._process_died)

    def send_async(self, message: Any, callback: Any) -> None:
        if self._dead is not None:
            dead = self._dead
            self.client.call(lambda: callback is not None and callback(dead, None))
            return
        configuration = self._configuration
        while len(self._pending) >= configuration.max_pending_messages() and self._dead is None:
            self._settled.wait(0.5)
        if not configuration.batching_enabled():
            self._enqueue([(message, callback)], batched=False)
            return
        limit = configuration.batching_max_allowed_size_in_bytes()
        if self._batch and self._batch_bytes + message.length() > limit:
            self._end_batch()
        self._batch.append((message, callback))
        self._batch_bytes += message.length()
        if len(self._batch) >= configuration.batching_max_messages() or self._batch_bytes >= limit:
            self._end_batch()
        elif len(self._batch) == 1:
            number = self._batch_number
            seconds = configuration.batching_max_publish_delay_ms() / 1000
            self._scheduler.after(seconds, lambda: number == self._batch_number and self._end_batch())

    def flush(self) -> None:
        self._end_batch()
        while self._pending and self._dead is None:
            self._settled.wait(0.5)
        if self._pending or self._dead is not None:
            raise pulsar.AlreadyClosed("the producer was closed")

    def close(self) -> None:
        """Close it; what is not acknowledged fails at once."""
        self._fail(pulsar.Result.AlreadyClosed)
        self.client.process.clock.sleep(self._cluster.delay())
        self.abandon()

    def is_connected(self) -> bool:
        return self._dead is None and self in self.topic.producers

    def abandon(self) -> None:
        """Leave the cluster."""
        self._connection += 1
        self._fail(pulsar.Result.AlreadyClosed)
        self.client.forget(self)
        self.topic.producers.pop(self, None)

    @property
    def answers(self) -> bool:
        """Whether its process answers the cluster."""
        process = self.client.process
        return not process.paused and self._cluster.world.network.reachable(process.host.name, self._cluster.host)

    # Batches

    def _end_batch(self) -> None:
        pairs, self._batch, self._batch_bytes = self._batch, [], 0
        self._batch_number += 1
        if pairs:
            self._enqueue(pairs, batched=True)

    def _enqueue(self, pairs: list[tuple[Any, Any]], *, batched: bool) -> None:
        messages, callbacks = [message for message, _ in pairs], [callback for _, callback in pairs]
        self._sequence += len(pairs)
        send = Send(messages, callbacks, self._sequence, batched=batched)
        if self._dead is not None:
            dead = self._dead
            self.client.call(lambda: send.answer(dead))
        elif self._too_big(messages):
            self.client.call(lambda: send.answer(pulsar.Result.MessageTooBig))
        else:
            self._pending.append(send)
            if self in self.topic.producers:
                self._transmit(send)

    def _too_big(self, messages: list[Any]) -> bool:
        size = sum(map(size_of, messages))
        if size > self._cluster.max_message_bytes and self._compressed:
            size = sum(len(zlib.compress(message.data(), 1)) for message in messages)
        return size > self._cluster.max_message_bytes

    # In the cluster

    def _take(self) -> None:
        """Attach to the topic for the first time. Raises ProducerFenced and ProducerBusy."""
        topic = self.topic
        if self._mode == pulsar.ProducerAccessMode.ExclusiveWithFencing:
            for older in [*topic.producers]:
                self._cluster.world.count("fencing")
                older.refuse(pulsar.Result.ProducerFenced)
        elif self.exclusive and topic.producers:
            raise pulsar.ProducerFenced("the topic has producers")
        elif topic.owner is not None:
            raise pulsar.ProducerBusy("the topic has an exclusive producer")
        topic.producers[self] = None
        topic.epoch += self.exclusive
        self._epoch = topic.epoch

    def disconnect(self) -> None:
        """The connection is lost; the producer attaches again after some time."""
        self._connection += 1
        self.topic.producers.pop(self, None)
        if self._dead is None and not self.client.process.dead:
            self._scheduler.after(self._cluster.random.uniform(0.05, 2.0), self._attach)

    def refuse(self, result: Any) -> None:
        """The cluster ends the producer, which learns it some time later."""
        self._connection += 1
        self.topic.producers.pop(self, None)
        late = self._cluster.random.random() < 0.2
        seconds = self._cluster.random.uniform(0.0, 3.0) if late else self._cluster.delay()
        self._scheduler.after(seconds, lambda: self._fail(result))

    def _attach(self) -> None:
        """Attach again after a disconnect, and resend."""
        process = self.client.process
        if self._dead is not None or process.dead or self in self.topic.producers:
            return
        if not self.answers or not self._cluster.serves(process, self.name):
            self._scheduler.after(0.5, self._attach)
            return
        topic = self._cluster.create(self.name)
        if topic is not self.topic:
            self._cluster.world.count("producer in a re-created topic")
            self.topic, self._epoch = topic, topic.epoch
        if topic.owner is not None and not self.exclusive:
            self._scheduler.after(0.5, self._attach)
        elif self.exclusive and (topic.producers or self._epoch < topic.epoch):
            self._fail(pulsar.Result.ProducerFenced)
        else:
            topic.producers[self] = None
            for send in [*self._pending]:
                self._transmit(send)

    def _transmit(self, send: Send) -> None:
        connection = self._connection
        self._later(0, lambda: self._arrive(send, connection), self._cluster.delay())

    def _arrive(self, send: Send, connection: int) -> None:
        if connection != self._connection:
            return
        cluster = self._cluster
        if not cluster.hears(self.client.process):
            self.disconnect()
            return
        before = self.topic.sequences.get(self._id, 0)
        if self.topic.deduplicates and send.sequence <= before:
            self._acknowledge(send, connection, duplicate=True)
            return
        if send.stored is not None:
            cluster.world.count("duplicate append")
        breaks = len(self._pending) > 1 and cluster.random.random() < cluster.broken_appends
        send.stored = cluster.store(self.topic, send.messages, batched=send.batched, compressed=self._compressed)
        if self.topic.deduplicates:
            self.topic.sequences[self._id] = send.sequence
        if self._killed_in_resend:
            cluster.world.count("kill in resend")
            self.client.process.kill()
        elif breaks:
            cluster.world.count("partial append")
            self._killed_in_resend = cluster.random.random() < KILLED_IN_RESEND
            self.disconnect()
        else:
            self._acknowledge(send, connection)

    def _acknowledge(self, send: Send, connection: int, *, duplicate: bool = False) -> None:
        cluster = self._cluster
        seconds = cluster.delay()
        if cluster.random.random() < cluster.slow_acknowledgements:
            cluster.world.count("late acknowledgement")
            seconds = cluster.random.uniform(0.0, 2.0)
        entry = send.stored
        if duplicate or entry is None:
            ids = [_pulsar.MessageId(-1, -1, -1, -1)] * len(send.messages)
        else:
            ids = [message.message_id() for message in entry.messages]

        def give_up() -> None:
            if connection == self._connection:
                self.disconnect()

        def arrive() -> None:
            if connection != self._connection or self._dead is not None:
                cluster.world.count("lost acknowledgement")
            elif not cluster.reaches(self.client.process):
                cluster.world.count("lost acknowledgement")
                self._scheduler.after(cluster.random.uniform(0.0, GIVE_UP_SECONDS), give_up)
            elif self._pending and self._pending[0] is send:
                self._pending.popleft()
                self._settled.notify_all()
                self.client.call(lambda: send.answer(OK, ids))

        self._later(1, arrive, seconds)

    def _later(self, direction: int, call: Callable[[], None], seconds: float) -> None:
        """Call something after the earlier calls in this direction."""
        self._last[direction] = max(self._last[direction], self._scheduler.now + seconds)
        self._scheduler.at(self._last[direction], call)

    def _fail(self, result: Any) -> None:
        """End the producer: all that is not acknowledged fails."""
        if self._dead is None:
            self._dead = result
            pending, self._pending = self._pending, deque()
            for send in pending:
                self.client.call(lambda send=send: send.answer(result))
            for _, callback in self._batch:
                if callback is not None:
                    self.client.call(lambda callback=callback: callback(result, None))
            self._batch = []
            self._settled.notify_all()

    def _process_died(self) -> None:
        cluster, host = self._cluster, self.client.process.host
        unnoticed = host.silent or not cluster.world.network.reachable(host.name, cluster.host)
        self._connection += unnoticed
        seconds = cluster.random.uniform(5.0, 40.0) if unnoticed else 2 * cluster.delay()
        self._scheduler.after(seconds, lambda: self.topic.producers.pop(self, None))


class SimReader:
    """A reader; the cluster sends it messages ahead, up to the size of its queue."""

    def __init__(
        self,
        client: SimClient,
        name: str,
        start: tuple[int, int, int],
        *,
        inclusive: bool,
        compacted: bool,
        ahead: int,
    ) -> None:
        self.name = name
        self.client = client
        self.compacted = compacted
        self._reader = self  # what the Python wrapper of the library wraps
        self._cluster = client.cluster
        self._scheduler = client.cluster.world.scheduler
        self._ahead = ahead
        self._start, self._inclusive = start, inclusive
        self._taken: tuple[int, int, int] | None = None
        self._queue: deque[Received] = deque()
        self._waiting: deque[Any] = deque()
        self._arrived = Signal(self._scheduler)
        self._connection = 0
        self._coming = False
        self._closed = self._silent = False
        self._nothing_until = 0.0
        self.topic = self._cluster.create(name)
        self._join(self.topic)
        client.process.on_death.append(self._leave)

    def read_next(self, milliseconds: int) -> Received:
        clock = self.client.process.clock
        deadline = clock.monotonic() + milliseconds / 1000
        while not self._queue:
            if self._closed:
                raise pulsar.AlreadyClosed("the reader is closed")
            if (left := deadline - clock.monotonic()) <= 0:
                clock.sleep(CALL_SECONDS)
                raise _pulsar.Timeout("no message came in time")
            self._arrived.wait(left)
        return self._pop()

    def read_next_async(self, callback: Any) -> None:
        if self._closed:
            self.client.call(lambda: callback(pulsar.Result.AlreadyClosed, None))
            return
        self._waiting.append(callback)
        self._serve_waiting()

    def has_message_available_async(self, callback: Any) -> None:
        self._scheduler.after(2 * self._cluster.delay(), lambda: self._answer_whether_more(callback))

    def is_connected(self) -> bool:
        return not self._closed and (self._silent or self in self.topic.readers)

    def seek(self, place: tuple[int, int, int]) -> None:
        """Continue at another position."""
        self._leave()
        self._queue.clear()
        self._start, self._taken = place, None
        self._join(self.topic)

    def close(self) -> None:
        self.client.process.clock.sleep(self._cluster.delay())
        self.abandon()

    def abandon(self) -> None:
        """Leave the cluster."""
        self._closed = True
        self._leave()
        self.client.forget(self)
        self._arrived.notify_all()
        while self._waiting:
            callback = self._waiting.popleft()
            self.client.call(lambda callback=callback: callback(pulsar.Result.AlreadyClosed, None))

    # In the cluster

    def disconnect(self) -> None:
        """The connection is lost; the reader attaches again after some time, or dies without knowing it."""
        self._leave()
        if self._closed or self.client.process.dead:
            return
        if self._cluster.random.random() < self._cluster.silent_readers:
            self._cluster.world.count("silent reader")
            self._silent = True
        else:
            self._scheduler.after(self._cluster.random.uniform(0.05, 2.0), self._attach)

    def skip_to(self, place: Place) -> None:
        """The cluster moves the reader, as truncation does; what it was sent already stays."""
        self._after = max(self._after, place)

    def fall_behind(self, seconds: float) -> None:
        """Let the cluster send it nothing more for some seconds."""
        self._nothing_until = self._scheduler.now + seconds

    def pump(self) -> None:
        """Let the cluster send what comes next, if there is room for it."""
        if self._coming or len(self._queue) > self._ahead // 2 or self not in self.topic.readers:
            return
        if next(self.topic.entries_after(self._after, compacted=self.compacted), None) is None:
            return
        self._coming = True
        connection = self._connection
        seconds = max(self._cluster.delay(), self._nothing_until - self._scheduler.now)
        self._scheduler.after(seconds, lambda: self._deliver(connection))

    def _deliver(self, connection: int) -> None:
        self._coming = False
        if connection != self._connection:
            self.pump()
            return
        if not self._cluster.reaches(self.client.process):
            self.disconnect()
            return
        count = 0
        for entry in self.topic.entries_after(self._after, compacted=self.compacted):
            if count and (count >= DELIVERED or len(self._queue) + count >= self._ahead):
                break
            self._after = entry.place
            for message in entry.messages:
                if self._is_wanted(message.place):
                    self._queue.append(message)
                    count += 1
        self._serve_waiting()
        self._arrived.notify_all()
        self.pump()

    def _is_wanted(self, place: tuple[int, int, int]) -> bool:
        """Whether a message of a batch is not before the start."""
        if self._taken is not None:
            return place > self._taken
        if place[:2] != self._start[:2] or place[2] < 0 or self._start[2] < 0:
            return True
        return place[2] >= self._start[2] if self._inclusive else place[2] > self._start[2]

    def _join(self, topic: StoredTopic) -> None:
        """Attach to a topic: after the last message that was taken, or at the start."""
        ledger, entry, batch = self._start if self._taken is None else self._taken
        whole = batch >= 0 or (self._taken is None and self._inclusive)
        if self._taken is None and not self._inclusive and batch < 0 and self._is_batch(topic, Place(ledger, entry)):
            whole = True
        after = Place(ledger, entry - 1 if whole else entry)
        self._after = min(after, topic.last) if after > topic.last else after
        self.topic = topic
        topic.readers[self] = None
        choose = self._cluster.random
        if choose.random() < self._cluster.slow_readers:
            self._cluster.world.count("slow reader")
            self.fall_behind(choose.uniform(0.0, SLOW_SECONDS))
        self.pump()

    @staticmethod
    def _is_batch(topic: StoredTopic, place: Place) -> bool:
        found = topic.find(place)
        return found is not None and found.batched

    def _attach(self) -> None:
        process = self.client.process
        if self._closed or process.dead or self in self.topic.readers:
            return
        if process.paused or not self._cluster.serves(process, self.name):
            self._scheduler.after(0.5, self._attach)
            return
        topic = self._cluster.create(self.name)
        if topic is not self.topic:
            self._cluster.world.count("reader in a re-created topic")
        self._join(topic)

    def _leave(self) -> None:
        """The cluster detaches it; what was sent ahead is dropped."""
        self._connection += 1
        self.topic.readers.pop(self, None)
        self._queue.clear()

    def _pop(self) -> Received:
        message = self._queue.popleft()
        self._taken = message.place
        self.pump()
        return message

    def _serve_waiting(self) -> None:
        while self._waiting and self._queue:
            call = partial(self._waiting.popleft(), OK, self._pop())
            choose = self._cluster.random
            if self._cluster.slow_callbacks and choose.random() < self._cluster.slow_callbacks:
                self._cluster.world.count("slow callback")
                self._scheduler.after(choose.uniform(0.0, CALLBACK_SECONDS), partial(self.client.call, call))
            else:
                self.client.call(call)

    def _answer_whether_more(self, callback: Any) -> None:
        if self._queue:
            self.client.call(lambda: callback(OK, True))
        elif self._silent:
            self.client.call(lambda: callback(OK, False))
        elif self not in self.topic.readers or not self._cluster.reachable(self.client.process):
            self._scheduler.after(10.0, lambda: self.client.call(lambda: callback(pulsar.Result.NotConnected, False)))
        else:
            last = self.topic.last_message(compacted=self.compacted)
            taken = self._taken or (*self._after, 1 << 31)
            self.client.call(lambda: callback(OK, last > taken))
