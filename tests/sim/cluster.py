"""A simulated Pulsar cluster: its brokers, what they store, and what is wrong with them at the moment.

The broker port of the product runs unmodified on it. What is simulated is the Python interface of Pulsar's client
library (`cluster_client`) and the REST interface (`cluster_admin`) over stored topics (`cluster_topics`). The cluster
is on a host of its own, which can be cut off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pulsar
from sim.cluster_admin import AdminInterface, SimAdmin
from sim.cluster_client import MAX_ENTRY, SimClient
from sim.cluster_threads import threads_of_processes
from sim.cluster_topics import Entry, StoredTopic

from broker_io.pulsar import admin as pulsar_admin
from broker_io.pulsar.credentials import Credentials

if TYPE_CHECKING:
    from sim.world import Process, World

HOST = "pulsar"
PORT, ADMIN_PORT = 6650, 8080
NAMESPACE = "public/default"
ADDRESS = f"pulsar://{HOST}:{PORT}/{NAMESPACE}"
DELAY = 0.001
CHECK_SECONDS = 5.0
MOVED_WITHIN = 0.06
"""Seconds after its creation within which a new topic moves to another broker, if it does: while it is registered."""
KEEPALIVE = 30.0
"""Seconds without an answer after which the cluster gives up a connection."""


class SimCluster:
    """The cluster: topics by name, `TENANT/NAMESPACE/TOPIC`, and the faults that it has at the moment."""

    host = HOST

    def __init__(self, world: World, *, ledger_entries: int = 1000) -> None:
        self.world = world
        self.ledger_entries = ledger_entries
        self.max_message_bytes = MAX_ENTRY
        self.namespaces: dict[str, None] = {NAMESPACE: None}
        self.topics: dict[str, StoredTopic] = {}
        self.partitioned: dict[str, int] = {}
        self.away = False
        self.slow_acknowledgements = 0.0
        """The probability that an acknowledgement takes up to two seconds."""
        self.broken_appends = 0.0
        """The probability that a producer loses its connection between two entries that are under way."""
        self.lost_answers = 0.0
        """The probability that a request to the admin interface times out; half of them have their effect."""
        self.odd_answers = 0.0
        """The probability that the cluster refuses a request for the moment, or says so after its effect."""
        self.silent_readers = 0.0
        """The probability that a reader falls silent for ever when its topic is unloaded."""
        self.slow_readers = 0.0
        """The probability that a reader which attaches gets nothing for some seconds."""
        self.moved_new_topics = 0.0
        """The probability that a topic moves to another broker just after its creation."""
        self.slow_callbacks = 0.0
        """The probability that a reader's callback gets its message late; its queue has the next ones meanwhile."""
        self.slow_compaction = 0.0
        """Seconds that a compaction takes, at most."""
        self.random = world.random("cluster")
        self._admin = AdminInterface(self)
        self._unowned: dict[str, float] = {}
        self._ids = self._ledger = 0
        self._unseen: dict[Any, float] = {}
        host = world.host(HOST)
        for port in (PORT, ADMIN_PORT):
            world.network.listeners[HOST, port] = lambda name: not self.away and world.network.reachable(name, HOST)
        self.clock = host.clock
        world.scheduler.after(CHECK_SECONDS, self._check_connections)

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def new_ledger(self) -> int:
        self._ledger += 1 + int(self.random.random() * 3)
        return self._ledger

    def delay(self) -> float:
        return DELAY * (0.5 + self.random.random())

    # Who reaches it

    def reachable(self, process: Process) -> bool:
        """Whether a process can connect, and gets answers."""
        return self.hears(process) and self.reaches(process)

    def hears(self, process: Process) -> bool:
        """Whether what a process sends arrives."""
        return not self.away and self.world.network.carries(process.host.name, HOST)

    def reaches(self, process: Process) -> bool:
        """Whether what the cluster sends arrives at a process."""
        return not self.away and self.world.network.carries(HOST, process.host.name)

    def owned(self, name: str) -> bool:
        """Whether a broker serves the topic, or would create it."""
        return self._unowned.get(name, 0.0) <= self.world.now

    def serves(self, process: Process, name: str) -> bool:
        return self.reachable(process) and self.owned(name) and name.rpartition("/")[0] in self.namespaces

    def fate_of_request(self) -> str:
        """What happens to a request of the admin interface; empty: nothing unusual."""
        choose = self.random.random
        fate = ""
        if choose() < self.lost_answers:
            fate = "lost request" if choose() < 0.5 else "lost answer"
        elif choose() < self.odd_answers:
            kind = choose()
            fate = "odd answer" if kind < 0.7 else "odd answer after the effect" if kind < 0.85 else "broken connection"
        if fate:
            self.world.count(fate)
        return fate

    def maybe_refuse(self) -> None:
        """Sometimes refuse to open a producer or a reader for the moment."""
        if self.random.random() < self.odd_answers:
            self.world.count("refused opening")
            raise self.random.choice((pulsar.ServiceUnitNotReady, pulsar.ConnectError, pulsar.UnknownError))(
                "the topic is moving"
            )

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """What the admin interface answers."""
        return self._admin.answer(method, path, body)

    # Topics

    def create(self, name: str) -> StoredTopic:
        """The topic of a name; it is created if there is none, as Pulsar does by default."""
        if name not in self.topics:
            now = self.clock.now_ms() / 1000
            created = self.topics[name] = StoredTopic(name, now, self.new_ledger, self.ledger_entries)
            if self.moved_new_topics and self.random.random() < self.moved_new_topics:
                self.world.scheduler.after(self.random.uniform(0.0, MOVED_WITHIN), lambda: self._move(created))
        return self.topics[name]

    def _move(self, topic: StoredTopic) -> None:
        if not topic.deleted:
            self.world.count("moved new topic")
            self.unload(topic.name)

    def store(self, topic: StoredTopic, messages: list[Any], *, batched: bool, compressed: bool) -> Entry:
        """Store an entry of a producer."""
        return topic.append(messages, self.clock.now_ms(), batched=batched, compressed=compressed)

    def delete(self, name: str) -> None:
        """Delete a topic with all that is attached to it, which will attach to the next topic of this name."""
        topic = self.topics.pop(name)
        topic.deleted = True
        self._close(topic)

    def unload(self, name: str, seconds: float = 0.0) -> None:
        """Move a topic to another broker: its producers and readers lose their connections, its ledger is closed.

        No broker owns it for some seconds.
        """
        topic = self.topics[name]
        topic.load()
        self._unowned[name] = self.world.now + seconds
        self._close(topic)

    @staticmethod
    def _close(topic: StoredTopic) -> None:
        for handle in [*topic.producers, *topic.readers]:
            handle.disconnect()

    def unload_namespace(self, namespace: str, seconds: float = 0.0) -> None:
        for name in [*self.topics]:
            if name.startswith(f"{namespace}/"):
                self.unload(name, seconds)

    def delete_namespace(self, namespace: str) -> None:
        """Delete a namespace with its topics."""
        del self.namespaces[namespace]
        for name in [*self.topics]:
            if name.startswith(f"{namespace}/"):
                self.delete(name)
        for name in [*self.partitioned]:
            if name.startswith(f"{namespace}/"):
                del self.partitioned[name]

    def compact(self, topic: StoredTopic) -> None:
        """Start a compaction; one that an unload interrupts, or that can't read a ledger, has no effect."""
        topic.compaction = "RUNNING"
        load = topic.loads

        def end() -> None:
            if topic.loads == load and not topic.deleted:
                readable = topic.readable
                topic.compaction = "SUCCESS" if readable else "ERROR"
                if readable:
                    topic.compact()

        seconds = self.random.uniform(0.0, self.slow_compaction) if self.slow_compaction else 5 * self.delay()
        self.world.scheduler.after(seconds, end)

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
        silent: dict[Any, float] = {}
        for topic in [*self.topics.values()]:
            for producer in [*topic.producers]:
                if producer.answers:
                    continue
                silent[producer] = self._unseen.get(producer, now)
                if now - silent[producer] >= KEEPALIVE:
                    self.world.log(HOST, f"detaches a producer of {producer.name}")
                    producer.disconnect()
        self._unseen = silent
        self.world.scheduler.after(CHECK_SECONDS, self._check_connections)


@contextlib.contextmanager
def in_place_of_pulsar(cluster: SimCluster) -> Iterator[None]:
    """Let Pulsar's client library and the REST client reach a simulated cluster for a block."""
    scheduler = cluster.world.scheduler

    def process() -> Process:
        thread = scheduler.current
        assert thread is not None
        return thread.process

    def client(_: str, *, operation_timeout_seconds: int = 30, **__: Any) -> SimClient:
        return SimClient(cluster, process(), operation_timeout_seconds)

    patched: list[tuple[Any, str, Any]] = [
        (pulsar, "Client", client),
        (pulsar_admin, "PoolManager", lambda **_: SimAdmin(cluster, process())),
        (Credentials, "tls_context", lambda _: None),  # reads certificates for a tenth of a second
    ]
    before = [getattr(owner, name) for owner, name, _ in patched]
    for owner, name, value in patched:
        setattr(owner, name, value)
    try:
        with threads_of_processes(lambda: None if scheduler.current is None else scheduler.current.process):
            yield
    finally:
        for (owner, name, _), value in zip(patched, before, strict=True):
            setattr(owner, name, value)
