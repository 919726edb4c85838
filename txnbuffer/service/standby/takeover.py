"""Takeover: wait for the decision log, acquire it, recover the buffers of all topics and create the coordinator.

The functions here block on the broker. The first service of a namespace also creates the partitions of the internal
topics, one per shard; their number can't change later.

A standby waits until the owner of the decision log is gone, and keeps reading the log meanwhile. It never fences: the
cluster decides that the owner is gone and gives the exclusive writer to one of the waiting processes. The other
standbys keep waiting; a service without `--standby` ends. After an outage a standby lets the owner reconnect first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from broker_io.batch import Batch
from broker_io.environment import Clock, current
from broker_io.errors import Damaged, Error, NotLive, StillHeld
from broker_io.port import (
    AnnotatedBroker,
    Broker,
    PartitionedBroker,
    PolicyBroker,
    ReloadingBroker,
    Writer,
    open_or_make,
)
from broker_io.position import Position
from snapshots.errors import TopicDamaged
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.scan import Scan
from snapshots.shard_count import record_shard_count, recorded_shard_count
from snapshots.shards import ONLY, Shard
from snapshots.writer import MAX_ENTRY_BYTES
from txnbuffer.buffer.buffer import SEGMENT_SIZE
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import OwnerAddress, OwnerEpoch, encode_owner_address
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.coordinator.takeover import (
    Acquisition,
    data_loss_evidence,
    first_epoch,
    initial_low_water_mark,
    missing_owner_evidence,
)
from txnbuffer.errors import DecisionsLost, InvalidConfiguration
from txnbuffer.plug_in import check_readable
from txnbuffer.progress import report
from txnbuffer.recovery.codec import segment_items
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.recovery.manager import SnapshotManager
from txnbuffer.recovery.restore import restored_topics
from txnbuffer.recovery.warm_topic import WarmTopic
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.standby.decision_log import DecisionLog, as_log_deleted
from txnbuffer.service.standby.warm_topics import WarmTopics

INTERNAL_TOPICS = (DECISIONS, SNAPSHOT_TOPIC, SHARD_MESSAGES)

MAX_SHARDS = 256


def check_shard(shard: Shard, max_shards: int) -> None:
    """Raises InvalidConfiguration for an invalid shard of a log that has at most so many."""
    if shard.of > max_shards == 1:
        raise InvalidConfiguration(f"this log has one shard, not {shard.of}: only a cluster has several")
    if not 1 <= shard.of <= max_shards:
        raise InvalidConfiguration(f"{shard.of} shards are configured: use 1 to {max_shards}")
    if shard.number < 0:
        raise InvalidConfiguration(f"--shard is missing: give the shard to serve, 0 to {shard.of - 1}")
    if shard.number >= shard.of:
        raise InvalidConfiguration(f"there is no shard {shard.number} of {shard.of}: give --shard 0 to {shard.of - 1}")


def prepare(broker: Broker, shard: Shard) -> None:
    """Create the partitions of the internal topics if there are several shards; a crash may have left some missing.

    Raises InvalidConfiguration, without creating anything, if the namespace has another number of shards or if its
    internal topics do not match.
    """
    if not isinstance(broker, PartitionedBroker):
        if shard.of > 1:
            raise InvalidConfiguration(f"this log has one shard, not {shard.of}: only a cluster has several")
        return
    several = shard.of > 1
    counts = {topic: broker.partitions(topic) for topic in (INTERNAL_TOPICS if several else INTERNAL_TOPICS[:2])}
    known = recorded_shard_count(broker) if any(counts.values()) else None
    there = {*broker.topics()} if several else set()
    found = {
        topic: count if known is None or count < known else known
        for topic, count in counts.items()
        if count or topic in there
    }
    _check_partitions(shard.of, found)
    if several:
        for topic in INTERNAL_TOPICS:
            if topic not in found:
                broker.partition(topic, shard.of)
                _check_partitions(shard.of, {topic: broker.partitions(topic)})  # another service may have been first
        if known is None:
            record_shard_count(broker, shard.of)


def _check_partitions(shards: int, found: dict[str, int]) -> None:
    """`found`: partitions of the existing topics, 0 for one that is not partitioned. One shard needs no partitions."""
    wanted = shards if shards > 1 else 0
    numbers = {*found.values()}
    if numbers <= {wanted}:
        return
    if len(numbers) == 1:
        has = max(numbers.pop(), 1)
        raise InvalidConfiguration(
            f"this namespace has {has} shards, fixed when it was first served, not {shards}: give --shards {has}"
        )
    facts = ", ".join(f"{topic} has {count or 'no'}" for topic, count in found.items())
    raise InvalidConfiguration(
        f"the internal topics have different numbers of partitions: {facts}; one was not created by a service: delete "
        "it with `pulsar-admin topics delete` or `delete-partitioned-topic`, if no service wrote to it"
    )


AT_ONCE = 16
"""Topics of a cluster that are recovered at the same time: each takes a dozen requests, one after the other."""


class Identity(NamedTuple):
    """An owner: its name for people, the HOST:PORT where clients reach it (or empty), and its shard."""

    owner: str
    address: str = ""
    shard: Shard = ONLY
    creates_topics: bool = True


class StandbyState(NamedTuple):
    """What a standby has acquired: the decision log's exclusive writer, the log as read so far, and warm topics."""

    decisions: Writer
    log: DecisionLog
    warm: Mapping[str, WarmTopic] = MappingProxyType({})

    def close(self) -> None:
        """Give it up; nothing was written."""
        _close(self.warm)
        self.log.close()
        self.decisions.close()


class FoundLog(NamedTuple):
    """A log of this process before it is owned. `idle`: its owner has nothing to write before a client does."""

    state: StandbyState
    idle: bool


class OwnedLog(NamedTuple):
    """What an engine owns. `at`: the position of its own entry in the decision log.

    `inbox_end`: the end of the shard's inbox at takeover; `name`: the identity of the log; `owners`: its newest owners,
    by epoch.
    """

    coordinator: Coordinator
    decisions: Writer
    manager: SnapshotManager
    at: Position
    inbox_end: Position | None
    name: str
    owners: Mapping[int, OwnerEpoch]


def take_over(
    broker: Broker,
    identity: Identity,
    config: CoordinatorConfig,
    policy: SnapshotPolicy,
    clock: Clock,
    now: Callable[[], float],
    standby_state: StandbyState | None = None,
) -> OwnedLog:
    """Become the owner of a shard. Raises the error that prevents it; then nothing is owned.

    `now` is the coordinator's clock: seconds since 1970, monotonic.
    """
    shard, environment, cluster = identity.shard, current(), isinstance(broker, PolicyBroker)
    _prepare(broker, shard, standby_state)
    pool = environment.threads.executor(AT_ONCE if cluster else 1, "txnbuffer-recovery")
    snapshots = shard.topic(SNAPSHOT_TOPIC)
    manager = SnapshotManager(
        broker,
        clock=clock,
        policy=policy,
        snapshot_topic=snapshots,
        segment_size=min(SEGMENT_SIZE, segment_items(config.max_message_bytes)),
        max_entry_bytes=min(MAX_ENTRY_BYTES, config.max_message_bytes),
        each=pool.map,
    )
    writer, log, warm = standby_state or fence(broker, shard.topic(DECISIONS))
    try:
        if (why := missing_owner_evidence(log.history)) is not None:
            raise DecisionsLost(log.topic, why)
        with _raising_topic_damaged(log.topic):
            # A directory can be restored from a copy; the topics of a cluster can only be created again.
            at = _acquire_decisions(broker, log, writer, identity, config.max_message_bytes, restorable=not cluster)
        _check_admin_cluster(broker, log.topic, at)
        if isinstance(broker, AnnotatedBroker):  # clients find the address there without reading the log
            address = OwnerAddress(log.history.epoch, identity.address, identity.creates_topics)
            with contextlib.suppress(Error):
                broker.annotate(log.topic, encode_owner_address(address))
        inbox_end = _inbox_end(broker, shard) if shard.of > 1 else None
        name = broker.incarnation(log.topic)
        with _raising_topic_damaged(snapshots):
            manager.recover("" if cluster else environment.randomness.token(16).hex(), warm)
        _check_data_loss(log, shard, manager)
        first = initial_low_water_mark(log.history, clock.now_ms()) if cluster else None
        if first is not None:  # programs of a deleted namespace of the same name may still be writing lower ids
            writer.append(Batch.of([first])).result()
            log.history.apply(first)
        manager.check_registered(filter(shard.owns, log.history.topics))
    except BaseException:
        writer.close()
        _close(warm)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        log.close()
    coordinator = Coordinator(shard.number, log.history.epoch, config, log.history, now())
    return OwnedLog(coordinator, writer, manager, at, inbox_end, name, log.history.owners)


def _prepare(broker: Broker, shard: Shard, standby_state: StandbyState | None) -> None:
    """What comes before anything is written: raises PlugInMissing, and as `prepare` unless a standby did that."""
    try:
        check_readable(broker)
    except Error:
        if standby_state is not None:
            standby_state.close()
        raise
    if standby_state is None:
        prepare(broker, shard)


def _check_admin_cluster(broker: Broker, topic: str, at: Position) -> None:
    """Raises InvalidConfiguration if the admin interface belongs to another cluster than the broker."""
    if any(ledger.ledger == at.ledger and ledger.entries > at.entry for ledger in broker.ledgers(topic)):
        return
    raise InvalidConfiguration(
        f"the admin interface does not know the message just written to topic {topic!r} at {at}: check that admin_url "
        "and the broker's address belong to the same cluster"
    )


def _check_data_loss(log: DecisionLog, shard: Shard, manager: SnapshotManager) -> None:
    """Raises DecisionsLost if topics contain decisions that the decision log lacks."""
    buffers = {topic: manager.buffer(topic) for topic in manager.topics}
    lost = data_loss_evidence(log.history, log.history.epoch, shard.number, buffers)
    if lost is not None:
        raise DecisionsLost(log.topic, lost)


def _inbox_end(broker: Broker, shard: Shard) -> Position | None:
    """The end of the shard's inbox: earlier messages were for the previous owner, and are repeated if needed."""
    broker.create_topic(shard.topic(SHARD_MESSAGES))
    return broker.last_position(shard.topic(SHARD_MESSAGES))


def fence(broker: Broker, topic: str = DECISIONS) -> StandbyState:
    """Take a decision log from its owner, if it has one."""
    return read_decisions(broker, topic, open_or_make(broker, topic, lambda: broker.writer(topic, exclusive=True)))


def find(broker: Broker) -> FoundLog | None:
    """Read a log that only this process can write, and recover its topics; None for a new log. Nothing is written.

    It is not idle if a transaction is open, or if a topic can't be recovered from its newest snapshot. Raises as
    `fence`.
    """
    if not {DECISIONS, SNAPSHOT_TOPIC} <= {*broker.topics()}:
        return None
    warm: dict[str, WarmTopic] = {}
    state = StandbyState(*fence(broker)[:2], warm)
    try:
        idle = _is_idle(broker, state.log, warm)
    except Error:
        idle = False  # its owner finds the error again, and says what is wrong
    except BaseException:
        state.close()
        raise
    return FoundLog(state, idle)


def _is_idle(broker: Broker, log: DecisionLog, warm: dict[str, WarmTopic]) -> bool:
    """Recover all topics into `warm`, and say whether the owner of the log has nothing to do."""
    history, clock = log.history, current().clock
    with Scan(broker, SNAPSHOT_TOPIC) as running:
        running.read_to_end()
    topics = restored_topics(running.table)
    with report("recovery", "topics", len(topics)) as progress:
        for topic in topics:
            warm[topic] = WarmTopic.load(broker, running.table, topic, SNAPSHOT_TOPIC, clock)
            progress.advance()
    buffers = {topic: one.followed.buffer for topic, one in warm.items()}
    return (
        all(buffer.ongoing.oldest() is None for buffer in buffers.values())
        and warm.keys() >= history.topics.keys()
        and missing_owner_evidence(history) is None
        and data_loss_evidence(history, history.epoch + 1, ONLY.number, buffers) is None
    )


def read_decisions(broker: Broker, topic: str, writer: Writer) -> StandbyState:
    """Read a decision log with an acquired writer; the writer is closed if reading fails."""
    try:
        with _raising_topic_damaged(topic):
            return StandbyState(writer, DecisionLog(broker, topic))
    except BaseException:
        writer.close()
        raise


@contextlib.contextmanager
def _raising_topic_damaged(topic: str) -> Iterator[None]:
    """Raises TopicDamaged if the log of an internal topic is damaged: nothing can be decided without it."""
    try:
        yield
    except Damaged as error:
        raise TopicDamaged(topic, error, needed=True) from error


def _acquire_decisions(
    broker: Broker, log: DecisionLog, writer: Writer, identity: Identity, max_bytes: int, *, restorable: bool
) -> Position:
    """Write an `owner` entry to the decision log and read up to it; return its position."""

    def last_id() -> int | None:
        """The last id that is in a log of which a later part may be lost; None for a new log.

        A log may be in a later history than its first one, and have lost all its owners.
        """
        return log.history.highest_id if restorable and (log.history.owned or begun) else None

    history, drawn = log.history, current().randomness.token(16).hex()
    # Clients of the lost part of a log ignore owners of lower epochs.
    begun = first_epoch(broker.ledgers(log.topic)[-1].ledger) if restorable else 0
    epoch = max(history.epoch + 1, begun)
    acquisition = Acquisition(identity.owner, epoch, identity.address, drawn, history.owners, max_bytes, last_id())
    while True:
        at = writer.append(Batch.of([acquisition.entry()])).result().first
        if acquisition.read(log.read_to(at), log.history.owners, last_id()):
            log.history.epoch, log.history.owners = acquisition.epoch, {one.epoch: one for one in acquisition.owners}
            return at


SLICE = 1.0
"""Seconds of one attempt to become the owner; stopping a standby takes as long."""
READ_SECONDS = 0.25
LOOK_SECONDS = 0.1
"""Seconds between two looks at the owner of a cluster's log."""
PAUSE = 1.0
"""Seconds until a failed attempt is repeated."""
LAST_READ = 2.0
"""Seconds that a standby which became the owner waits for its last read; then it reads the whole log again."""
RELEASE_WAIT = 5.0
"""Seconds that a service without `--standby` waits for an owner that was just stopped or killed."""


def take_if_free(broker: Broker, shard: Shard = ONLY) -> StandbyState:
    """Become the exclusive writer of a decision log without an owner. Raises StillHeld, which names the owner."""
    topic = shard.topic(DECISIONS)
    prepare(broker, shard)
    try:
        writer = open_or_make(broker, topic, lambda: broker.writer(topic, exclusive=True, wait=RELEASE_WAIT))
    except StillHeld:
        raise StillHeld(
            f"another service owns this log{_owner_address(broker, topic)}: start this one with --standby to wait for "
            "its end, or with --fence to take the log from it"
        ) from None
    return read_decisions(broker, topic, writer)


def _owner_address(broker: Broker, topic: str) -> str:
    """The address of a log's newest owner as text for an error; empty if unknown."""
    try:
        return f", which serves at {ServiceDiscovery(broker, '', topic).newest_address()}"
    except Error:
        return ""


class Standby:
    """Waits for the ownership of a log. `problem`: the error of the last attempt, which is repeated.

    `warm_bytes`: memory for topics that are kept warm.
    """

    def __init__(self, broker: Broker, shard: Shard = ONLY, warm_bytes: int = 0) -> None:
        self.problem: Error | None = None
        self._broker = broker
        self._shard = shard
        self._topic = shard.topic(DECISIONS)
        self._log: DecisionLog | None = None
        self._stopping = current().threads.event()
        self.topics = WarmTopics(broker, shard, warm_bytes)

    @property
    def follows(self) -> bool:
        """Whether it reads the decision log as it grows."""
        return self._log is not None and self.problem is None

    async def wait(self, stop: asyncio.Event) -> StandbyState | None:
        """Return the decision log's exclusive writer and its contents once acquired; None if `stop` was set first.

        Raises errors that waiting can't fix.
        """
        while not await asyncio.to_thread(self._prepared):
            if stop.is_set():
                return None
        reading = asyncio.ensure_future(asyncio.to_thread(self._follow_log))
        following = asyncio.ensure_future(self.topics.run())
        writer: Writer | None = None
        async with contextlib.AsyncExitStack() as unused:
            try:
                while writer is None and not stop.is_set():
                    writer = await asyncio.to_thread(self._acquire)
            finally:
                if writer is not None:
                    unused.push_async_callback(asyncio.to_thread, writer.close)
                self._stopping.set()
                if (log := await _last_read(reading)) is not None:
                    unused.callback(log.close)
                unused.callback(_close, warm := await self.topics.release())
                await asyncio.wait([following], timeout=LAST_READ)
            if writer is None or stop.is_set():
                return None
            if log is None:
                log = await asyncio.to_thread(DecisionLog, self._broker, self._topic)
            unused.pop_all()
            return StandbyState(writer, log, warm)

    def _prepared(self) -> bool:
        """Create the internal topics; return False after a temporary error."""
        try:
            prepare(self._broker, self._shard)
            self._broker.create_topic(self._topic)
        except Error as error:
            self._pause_after(error)
            return False
        return True

    def _acquire(self) -> Writer | None:
        try:
            if isinstance(self._broker, ReloadingBroker):
                writer = self._broker.writer_of_left(self._topic)
                if writer is None:
                    self._stopping.wait(LOOK_SECONDS)
                return writer
            return self._broker.writer(self._topic, exclusive=True, wait=SLICE)
        except StillHeld:
            return None
        except Error as error:
            self._pause_after(error)
            return None

    def _pause_after(self, error: Error) -> None:
        """Pause after a temporary error. Raises any other."""
        if not error.retryable:
            raise as_log_deleted(error) from error
        self.problem = None if isinstance(error, NotLive) else error  # it waits for that
        self._stopping.wait(PAUSE)

    def _follow_log(self) -> DecisionLog | None:
        """Read the decision log as it grows; after a failure, such as trimming, read it again from the start.

        Return the log as read so far.
        """
        while not self._stopping.is_set():
            try:
                if self._log is None:
                    self._log = DecisionLog(self._broker, self._topic)
                self._log.read(READ_SECONDS)
                self.problem = None
            except Error as error:
                self.problem = None if isinstance(error, NotLive) else error
                if self._log is not None:
                    self._log.close()
                    self._log = None
                self._stopping.wait(PAUSE)
        return self._log


def _close(topics: Mapping[str, WarmTopic]) -> None:
    for topic in topics.values():
        topic.close()


async def _last_read(reading: asyncio.Future[DecisionLog | None]) -> DecisionLog | None:
    """The log as read so far; None if reading it does not end soon, as with a cluster that is slow to answer."""
    done, _ = await asyncio.wait([reading], timeout=LAST_READ)
    if done:
        return reading.result()

    def close_late(reading: asyncio.Future[DecisionLog | None]) -> None:
        if not reading.cancelled() and reading.exception() is None and (log := reading.result()) is not None:
            log.close()

    reading.add_done_callback(close_late)
    return None
