"""A simulated Pulsar cluster: topics, producers and readers that behave as real ones do, and the broker port over it.

The cluster is on a host of its own, which can be cut off. What it does beyond the contract of the port:

- A producer that loses its connection attaches again and resends what was not acknowledged: messages may be stored
  twice, and the acknowledged position is that of the second copy. Deduplication drops them and names no position.
- An exclusive producer holds its topic only while it is attached: after an unload another one may be first.
- Whoever is fenced learns it late; some of its last messages are stored, although it gets no acknowledgement.
- Appends of several messages are one entry, or several, of which a crash leaves the first ones.
- Readers fall silent for some seconds, compaction lags, and answers of the admin interface get lost.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from sim.threads import Signal, SimQueue

from broker_io.batch import Batch, PlacedBatch
from broker_io.errors import (
    AppendUnknown,
    Closed,
    Error,
    Fenced,
    PositionTrimmed,
    ServiceUnavailable,
    StillHeld,
    TopicNotFound,
)
from broker_io.memory.topic import TopicLog
from broker_io.partitions import Hashing
from broker_io.port import (
    MAX_MESSAGE_BYTES,
    OWN_PREFIX,
    Ledger,
    Resource,
    check_batch,
    check_compaction,
    check_topic_name,
)
from broker_io.position import EARLIEST, LATEST, Position, Positions
from broker_io.pulsar import broker as pulsar_broker

if TYPE_CHECKING:
    from sim.world import Process, World

HOST = "pulsar"
DELAY = 0.001
ADMIN_TIMEOUT = 5.0
LOOK_SECONDS = 0.1
CHECK_SECONDS = 5.0
KEEPALIVE = 30.0
"""Seconds without an answer after which the cluster gives up a connection."""
T = TypeVar("T")


class ClusterTopic(TopicLog):
    """One incarnation of a topic, with the producers that are attached to it."""

    def __init__(self, cluster: SimCluster, incarnation: str) -> None:
        super().__init__(incarnation, cluster.new_ledger, cluster.ledger_entries)
        self.annotation: str | None = None
        self.deduplicates = False
        self.epoch = 0
        """The number of exclusive producers that it has had."""
        self.producers: dict[ClusterWriter, None] = {}
        self.changed = Signal(cluster.world.scheduler)

    @property
    def owner(self) -> ClusterWriter | None:
        """The exclusive producer that is attached."""
        return next((producer for producer in self.producers if producer.exclusive), None)

    def notify(self) -> None:
        super().notify()
        self.changed.notify_all()


class SimCluster:
    """The cluster itself: topics, and the faults that it has at the moment."""

    def __init__(self, world: World, *, ledger_entries: int = 1000, compacted_prefix: str = OWN_PREFIX) -> None:
        self.world = world
        self.ledger_entries = ledger_entries
        self.compacted_prefix = compacted_prefix
        self.topics: dict[str, ClusterTopic] = {}
        self.partitioned: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.away = False
        self.slow_acknowledgements = 0.0
        """The probability that an acknowledgement takes up to two seconds."""
        self.broken_appends = 0.0
        """The probability that a producer loses its connection in the middle of an append of several messages."""
        self.lost_answers = 0.0
        """The probability that a request to the admin interface times out; half of them have their effect."""
        self.silent_readers = 0.0
        """The probability that a reader gets nothing for some seconds after its topic was unloaded."""
        self.slow_compaction = 0.0
        """Seconds that a compaction takes, at most."""
        self.random = world.random("cluster")
        self._ledger = 0
        self._unseen: dict[ClusterWriter, float] = {}
        world.host(HOST)
        world.scheduler.after(CHECK_SECONDS, self._check_connections)

    def new_ledger(self) -> int:
        self._ledger += 1 + int(self.random.random() * 3)
        return self._ledger

    def delay(self) -> float:
        return DELAY * (0.5 + self.random.random())

    def create(self, name: str) -> ClusterTopic:
        if name not in self.topics:
            topic = self.topics[name] = ClusterTopic(self, self.random.randbytes(8).hex())
            if name in self.deleted:
                topic.lost = Position(topic.ledgers[0].number, -1)
        return self.topics[name]

    def topic(self, name: str) -> ClusterTopic:
        if check_topic_name(name) not in self.topics:
            raise TopicNotFound(f"there is no topic {name!r}: create it first")
        return self.topics[name]

    def delete(self, name: str) -> None:
        topic = self.topics.pop(name)
        topic.deleted = True
        self.deleted.add(name)
        for producer in [*topic.producers]:
            producer.refuse(TopicNotFound(f"topic {name!r} was deleted: open a writer of the new one"))
        topic.notify()

    def unload(self, name: str) -> None:
        """Move a topic to another broker: its producers and readers lose their connections, its ledger is closed."""
        topic = self.topics[name]
        topic.roll()
        for producer in [*topic.producers]:
            producer.disconnect()
        for reader in [*topic.waiting]:
            if isinstance(reader, ClusterReader) and self.random.random() < self.silent_readers:
                reader.fall_silent(self.random.uniform(1.0, 8.0))

    def restart(self, seconds: float) -> None:
        """The broker is away for some seconds."""
        self.away = True
        for name in [*self.topics]:
            self.unload(name)

        def back() -> None:
            self.away = False

        self.world.scheduler.after(seconds, back)

    def _check_connections(self) -> None:
        """Detach producers whose process has not answered for some time, because it is paused or cut off."""
        now = self.world.now
        silent: dict[ClusterWriter, float] = {}
        for topic in self.topics.values():
            for producer in [*topic.producers]:
                if producer.answers:
                    continue
                silent[producer] = self._unseen.get(producer, now)
                if now - silent[producer] >= KEEPALIVE:
                    self.world.log(HOST, f"detaches a producer of {producer.name}")
                    producer.disconnect()
        self._unseen = silent
        self.world.scheduler.after(CHECK_SECONDS, self._check_connections)

    def reachable(self, process: Process) -> bool:
        return not self.away and self.world.network.reachable(process.host.name, HOST)


class Append:
    """An append of a producer that is not acknowledged yet."""

    __slots__ = ("batch", "future", "stored")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.future: Future[Positions] = Future()
        self.stored: Positions | None = None


class ClusterWriter(Resource):
    """A producer: what the client library and the port make of it, and its place in the cluster."""

    def __init__(
        self, broker: ClusterBroker, name: str, topic: ClusterTopic, *, exclusive: bool, batches: bool
    ) -> None:
        self.exclusive = exclusive
        self.name = name
        self.topic = topic
        self._broker = broker
        self._cluster = broker.cluster
        self._scheduler = broker.cluster.world.scheduler
        self._batches = batches
        self._pending: deque[Append] = deque()
        self._connection = 0
        self._last = [0.0, 0.0]
        self._dead: Error | None = None
        topic.producers[self] = None
        topic.epoch += exclusive
        self._epoch = topic.epoch
        broker.process.on_death.append(self._process_died)

    @property
    def answers(self) -> bool:
        """Whether its process answers the cluster."""
        process = self._broker.process
        return not process.paused and self._cluster.world.network.reachable(process.host.name, HOST)

    def append(self, batch: Batch) -> Future[Positions]:
        check_batch(batch, self._broker.max_message_bytes)
        append = Append(batch)
        if self._dead is not None:
            append.future.set_exception(self._dead)
        elif not len(batch):
            append.future.set_result(Positions.of([]))
        else:
            self._pending.append(append)
            if self in self.topic.producers:
                self._send(append)
        return append.future

    def close(self) -> None:
        """Wait for pending appends for as long as the broker waits when it closes, then close."""
        clock, until = self._broker.process.clock, self._broker.close_timeout
        give_up = clock.monotonic() + until
        while self._pending and self._dead is None and clock.monotonic() < give_up:
            clock.sleep(0.01)
        unknown = AppendUnknown(f"the writer of topic {self.name!r} was closed before an append was acknowledged")
        if self._dead is None:
            self._fail(Closed(f"this writer of topic {self.name!r} is closed: open another one"), unknown)
        self._leave()

    def disconnect(self) -> None:
        """The connection of the producer is lost; it attaches again after some time."""
        self._connection += 1
        self.topic.producers.pop(self, None)
        if self._dead is None and not self._broker.process.dead:
            self._scheduler.after(self._cluster.random.uniform(0.05, 2.0), self._attach)

    def refuse(self, error: Error) -> None:
        """The cluster ends the producer, which learns it some time later."""
        self._connection += 1
        self._leave()
        late = self._cluster.random.random() < 0.2
        self._scheduler.after(self._cluster.random.uniform(0.0, 3.0) if late else DELAY, lambda: self._fail(error))

    def end(self, error: Error) -> None:
        """End the producer from its own process."""
        self._leave()
        self._fail(error)

    # In the cluster

    def _attach(self) -> None:
        """Attach again after a disconnect, and resend."""
        if self._dead is not None or self._broker.process.dead or self in self.topic.producers:
            return
        owner = self.topic.owner
        if self.topic.deleted:
            self._fail(TopicNotFound(f"topic {self.name!r} was deleted: open a writer of the new one"))
        elif self._cluster.away or not self.answers or (owner is not None and not self.exclusive):
            self._scheduler.after(0.5, self._attach)
        elif owner is not None or (self.exclusive and (self.topic.producers or self._epoch < self.topic.epoch)):
            self._fail(_fenced(self.name))
        else:
            self.topic.producers[self] = None
            for append in [*self._pending]:
                self._send(append)

    def _send(self, append: Append) -> None:
        connection = self._connection
        self._later(0, lambda: self._arrive(append, connection), self._cluster.delay())

    def _arrive(self, append: Append, connection: int) -> None:
        if connection != self._connection:
            return
        if not self._cluster.reachable(self._broker.process):
            self.disconnect()
            return
        if append.stored is not None and self.topic.deduplicates:
            self._acknowledge(append, connection, duplicate=True)
            return
        if append.stored is not None:
            self._cluster.world.count("duplicate append")
        breaks = len(append.batch) > 1 and self._cluster.random.random() < self._cluster.broken_appends
        append.stored = Positions.concat([*self._stored(append.batch, breaks=breaks)])
        if breaks:
            append.stored = None
            self._cluster.world.count("partial append")
            self.disconnect()
        else:
            self._acknowledge(append, connection)

    def _stored(self, batch: Batch, *, breaks: bool) -> Iterator[Positions]:
        """Store an append as one entry or as several; one that breaks off leaves some of its messages."""
        if breaks:
            batch = batch.take(slice(0, self._cluster.random.randrange(1, len(batch))))
        if self._batches and not breaks and self._cluster.random.random() < 0.7:
            yield self._store(batch)
            return
        done = 0
        while done < len(batch):
            size = 1 + int(self._cluster.random.random() * 3)
            yield self._store(batch.take(slice(done, done + size)))
            done += size

    def _store(self, batch: Batch) -> Positions:
        return self.topic.append(batch, self._cluster.world.host(HOST).clock.now_ms())

    def _acknowledge(self, append: Append, connection: int, *, duplicate: bool = False) -> None:
        seconds = self._cluster.delay()
        if self._cluster.random.random() < self._cluster.slow_acknowledgements:
            self._cluster.world.count("late acknowledgement")
            seconds = self._cluster.random.uniform(0.0, 2.0)
        positions = append.stored

        def arrive() -> None:
            if connection != self._connection or self._dead is not None:
                self._cluster.world.count("lost acknowledgement")
            elif duplicate:
                unknown = f"the cluster dropped a message of topic {self.name!r} as a duplicate: open another writer"
                self._fail(AppendUnknown(unknown))
            elif self._pending and self._pending[0] is append and positions is not None:
                self._pending.popleft()
                self._broker.resolve(append.future, positions)

        self._later(1, arrive, seconds)

    def _later(self, direction: int, call: Callable[[], None], seconds: float) -> None:
        """Call something after the earlier calls in this direction."""
        self._last[direction] = max(self._last[direction], self._scheduler.now + seconds)
        self._scheduler.at(self._last[direction], call)

    def _fail(self, error: Error, pending: Error | None = None) -> None:
        if self._dead is None:
            self._dead = error
            while self._pending:
                self._broker.resolve(self._pending.popleft().future, pending or error)

    def _leave(self) -> None:
        if self.topic.producers.pop(self, self) is None:
            self.topic.changed.notify_all()

    def _process_died(self) -> None:
        network, host = self._cluster.world.network, self._broker.process.host
        unnoticed = host.silent or not network.reachable(host.name, HOST)
        self._connection += 0 if not unnoticed else 1
        self._scheduler.after(self._cluster.random.uniform(5.0, 40.0) if unnoticed else 2 * DELAY, self._leave)


def _fenced(name: str) -> Fenced:
    return Fenced(f"another exclusive writer opened topic {name!r}")


class ClusterReader(Resource):
    """A reader of one incarnation of a topic."""

    def __init__(
        self,
        broker: ClusterBroker,
        name: str,
        topic: ClusterTopic,
        cursor: Position,
        floor: Position,
        *,
        compacted: bool,
    ) -> None:
        self._broker = broker
        self._name = name
        self._topic = topic
        self._cursor = cursor
        self._floor = floor
        self._compacted = compacted
        self._closed = False
        self._silent_until = 0.0

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        clock = self._broker.process.clock
        deadline = clock.monotonic() + timeout
        while True:
            self._check()
            found = self._next(max(limit, 1))
            if found is not None:
                self._cursor = found.positions.last
                return found
            if (left := deadline - clock.monotonic()) <= 0:
                return None
            self._topic.changed.wait(min(left, 0.5))

    def _next(self, limit: int) -> PlacedBatch | None:
        if self._silent or not self._broker.cluster.reachable(self._broker.process):
            return None
        return self._topic.read(self._cursor, limit, compacted=self._compacted)

    @property
    def _silent(self) -> bool:
        return self._broker.cluster.world.now < self._silent_until

    def fall_silent(self, seconds: float) -> None:
        """Get nothing for some seconds."""
        self._broker.cluster.world.count("silent reader")
        self._silent_until = self._broker.cluster.world.now + seconds

    def notify_when_readable(self, callback: Callable[[], None]) -> None:
        ended = self._closed or self._broker.closed or self._topic.deleted
        if ended or self._next(1) is not None:
            callback()
        else:
            self._topic.waiting[self] = lambda: self._broker.call(callback)

    def close(self) -> None:
        self._closed = True
        self._topic.waiting.pop(self, None)
        self._topic.changed.notify_all()

    def _check(self) -> None:
        if self._closed or self._broker.closed:
            raise Closed(f"this reader of topic {self._name!r} is closed: open another one")
        if self._topic.deleted:
            raise TopicNotFound(f"topic {self._name!r} was deleted: open a reader of the new one")
        lost = self._topic.lost
        if lost > self._floor and self._topic.lost_after(self._cursor, compacted=self._compacted):
            raise PositionTrimmed(f"topic {self._name!r}: messages after {self._cursor} were trimmed up to {lost}")


class ClusterBroker(Resource):
    """The broker port of one process. Requests wait for the cluster up to `max_unavailable` seconds."""

    def __init__(
        self,
        cluster: SimCluster,
        process: Process,
        *,
        max_unavailable: float = 60.0,
        close_timeout: float | None = None,
    ) -> None:
        self.cluster = cluster
        self.process = process
        self.closed = False
        self.hashing: Hashing = "java"
        self.max_message_bytes = MAX_MESSAGE_BYTES - 64 * 1024
        self.close_timeout = max_unavailable if close_timeout is None else close_timeout
        self._max_unavailable = max_unavailable
        self._writers: list[ClusterWriter] = []
        self._calls: Any = SimQueue(cluster.world.scheduler)
        process.environment.threads.thread(self._serve, name="acknowledgements", daemon=True).start()
        self._ask(lambda: None)

    # Requests

    def topics(self) -> list[str]:
        return self._ask(lambda: sorted(self.cluster.topics))

    def create_topic(self, topic: str) -> None:
        name = check_topic_name(topic)
        self._ask(lambda: self.cluster.create(name))

    def delete_topic(self, topic: str) -> None:
        self._ask(lambda: self.cluster.topic(topic))
        for writer in self._writers:
            if writer.name == topic:
                writer.end(TopicNotFound(f"topic {topic!r} was deleted: open it again if it was re-created"))
        self._ask(lambda: self.cluster.delete(topic), retry=False)

    def partitions(self, topic: str) -> int:
        return self._ask(lambda: self.cluster.partitioned.get(check_topic_name(topic), 0))

    def partition(self, topic: str, count: int) -> None:
        raise NotImplementedError("the simulated cluster has no partitioned topics")

    def incarnation(self, topic: str) -> str:
        return self._ask(lambda: self.cluster.topic(topic).incarnation)

    def annotate(self, topic: str, text: str) -> None:
        def annotate() -> None:
            self.cluster.topic(topic).annotation = text

        self._ask(annotate, retry=False)

    def annotation(self, topic: str) -> str | None:
        return self._ask(lambda: self.cluster.topic(topic).annotation, retry=False)

    def check_topic(self, topic: str) -> None:
        self.incarnation(topic)

    def deduplicate(self, topic: str) -> None:
        def deduplicate() -> None:
            self.cluster.topic(topic).deduplicates = True

        self._ask(deduplicate)

    def ledgers(self, topic: str) -> list[Ledger]:
        return self._ask(lambda: [ledger.describe() for ledger in self.cluster.topic(topic).ledgers])

    def first_position(self, topic: str) -> Position | None:
        return self._ask(lambda: self.cluster.topic(topic).first_position())

    def last_position(self, topic: str) -> Position | None:
        return self._ask(lambda: self.cluster.topic(topic).last)

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        return self._ask(lambda: self.cluster.topic(topic).position_at(time_ms))

    def roll(self, topic: str) -> None:
        self._ask(lambda: self.cluster.topic(topic).roll())

    def trim(self, topic: str, first_ledger: int) -> None:
        self._ask(lambda: self.cluster.topic(topic).trim(first_ledger))

    def compact(self, topic: str) -> None:
        self._ask(lambda: self.cluster.topic(topic))
        check_compaction(topic, self.cluster.compacted_prefix)
        if self.cluster.slow_compaction:
            self.process.clock.sleep(self.cluster.random.uniform(0.0, self.cluster.slow_compaction))
        self._ask(lambda: self.cluster.topic(topic).compact())

    # Handles

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> ClusterWriter:
        batches = not unbatched and not topic.startswith(self.cluster.compacted_prefix)
        if exclusive and wait is not None:
            return self._wait_for_owner(topic, wait, batches=batches)
        if exclusive:
            for own in self._writers:
                if own.name == topic:
                    own.end(_fenced(topic))
        return self._opened(
            self._ask(lambda: self._attach(topic, exclusive=exclusive, fences=exclusive, batches=batches))
        )

    def writer_of_new(self, topic: str) -> ClusterWriter:
        return self.writer(topic)

    def _attach(self, name: str, *, exclusive: bool, fences: bool, batches: bool) -> ClusterWriter:
        topic = self.cluster.topic(name)
        if fences:
            for older in [*topic.producers]:
                self.cluster.world.count("fencing")
                older.refuse(_fenced(name))
        elif topic.owner is not None or (exclusive and topic.producers):
            raise Fenced(f"topic {name!r} is held by an exclusive writer: wait until it is closed")
        return ClusterWriter(self, name, topic, exclusive=exclusive, batches=batches)

    def _wait_for_owner(self, topic: str, seconds: float, *, batches: bool) -> ClusterWriter:
        clock = self.process.clock
        deadline = clock.monotonic() + seconds
        while True:
            try:
                return self._opened(
                    self._ask(lambda: self._attach(topic, exclusive=True, fences=False, batches=batches))
                )
            except Fenced:
                missing = deadline - clock.monotonic()
            if missing <= 0:
                raise StillHeld(f"topic {topic!r} is held by an exclusive writer that is still open: wait longer")
            clock.sleep(min(missing, LOOK_SECONDS))

    def _opened(self, writer: ClusterWriter) -> ClusterWriter:
        self._writers = [each for each in self._writers if each._dead is None]
        self._writers.append(writer)
        return writer

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> ClusterReader:
        return self._ask(lambda: self._reader(topic, start, inclusive=inclusive, compacted=compacted))

    def _reader(self, topic: str, start: Position, *, inclusive: bool, compacted: bool) -> ClusterReader:
        log = self.cluster.topic(topic)
        if start >= LATEST:
            cursor = log.last or EARLIEST
        elif start == EARLIEST or not inclusive:
            cursor = start
        else:
            cursor = start._replace(batch=start.batch - 1)
        floor = log.lost if start == EARLIEST or start >= LATEST else EARLIEST
        return ClusterReader(self, topic, log, max(cursor, floor), floor, compacted=compacted)

    def close(self) -> None:
        if not self.closed:
            for writer in self._writers:
                writer.close()
            self.closed = True
            self._calls.put(None)
            for topic in self.cluster.topics.values():
                topic.notify()

    # Inside the process

    def resolve(self, future: Future[Positions], outcome: Positions | Error) -> None:
        """Set the outcome of an append, in the thread of acknowledgements."""
        if not self.process.dead:
            self._calls.put((future, outcome))

    def call(self, callback: Callable[[], None]) -> None:
        """Call something in the process, if it still runs."""
        if not self.process.dead:
            self._calls.put((None, callback))

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, outcome = item
            if future is None:
                outcome()
            elif isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _ask(self, work: Callable[[], T], *, retry: bool = True) -> T:
        """The answer of the cluster to a request. Raises ServiceUnavailable."""
        cluster, clock = self.cluster, self.process.clock
        give_up = clock.monotonic() + self._max_unavailable
        while True:
            if self.closed:
                raise Closed("this broker is closed: open another one")
            clock.sleep(cluster.delay())
            if cluster.reachable(self.process):
                if cluster.random.random() >= cluster.lost_answers:
                    answer = work()
                    clock.sleep(cluster.delay())
                    if cluster.reachable(self.process):
                        return answer
                    if isinstance(answer, ClusterWriter):
                        answer.end(Closed("nobody has this writer"))
                else:
                    cluster.world.count("lost answer")
                    if cluster.random.random() < 0.5:
                        lost = work()
                        if isinstance(lost, ClusterWriter):
                            lost.end(Closed("nobody has this writer"))
                    clock.sleep(ADMIN_TIMEOUT)
            if not retry or clock.monotonic() >= give_up:
                raise ServiceUnavailable("the cluster does not answer: check that its brokers are running")
            clock.sleep(cluster.random.uniform(0.1, 1.0))


@contextlib.contextmanager
def in_place_of_pulsar(cluster: SimCluster) -> Iterator[None]:
    """Let `open_broker` open a simulated cluster for a block."""

    def opened(address: str, *, max_unavailable: float = 60.0, close_timeout: float | None = None) -> ClusterBroker:
        thread = cluster.world.scheduler.current
        assert thread is not None
        return ClusterBroker(cluster, thread.process, max_unavailable=max_unavailable, close_timeout=close_timeout)

    before, pulsar_broker.PulsarBroker = pulsar_broker.PulsarBroker, opened
    try:
        yield
    finally:
        pulsar_broker.PulsarBroker = before
