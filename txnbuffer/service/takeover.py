"""How an engine takes over: the decision log, the buffers of all topics, the coordinator. It waits for the broker.

Partitions of our own topics, one for each shard: made by the first service of a namespace, fixed from then on.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from broker_io.batch import Batch
from broker_io.environment import Clock
from broker_io.errors import Damaged, Error
from broker_io.port import AnnotatedBroker, Broker, PartitionedBroker, PolicyBroker, Writer, open_or_make
from broker_io.position import Position
from snapshots.errors import TopicDamaged
from snapshots.keys import SNAPSHOT_TOPIC
from snapshots.policy import SnapshotPolicy
from snapshots.shard_count import record_shard_count, recorded_shard_count
from snapshots.shards import ONLY, Shard
from snapshots.writer import MAX_ENTRY_BYTES
from txnbuffer.buffer.buffer import SEGMENT_SIZE
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import OwnerAddress, OwnerEpoch, encode_owner_address
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.coordinator.takeover import (
    Acquisition,
    data_loss_evidence,
    initial_low_water_mark,
    missing_owner_evidence,
)
from txnbuffer.errors import DecisionsLost, InvalidConfiguration
from txnbuffer.recovery.codec import segment_items
from txnbuffer.recovery.manager import SnapshotManager
from txnbuffer.service.decision_log import DecisionLog

INTERNAL_TOPICS = (DECISIONS, SNAPSHOT_TOPIC, SHARD_MESSAGES)

MAX_SHARDS = 256


def check_shard(shard: Shard, *, shared: bool) -> None:
    """Raises InvalidConfiguration for a shard that can't be; `shared`: beside a cluster."""
    if shard.of > 1 and not shared:
        raise InvalidConfiguration(f"this log has one shard, not {shard.of}: only a cluster has several")
    if not 1 <= shard.of <= MAX_SHARDS:
        raise InvalidConfiguration(f"{shard.of} shards: there may be 1 to {MAX_SHARDS}")
    if shard.number < 0:
        raise InvalidConfiguration(f"say which of {shard.of} shards is meant, 0 to {shard.of - 1}: give --shard")
    if shard.number >= shard.of:
        raise InvalidConfiguration(
            f"there is no shard {shard.number} of {shard.of}: they are 0 to {shard.of - 1}; give --shard"
        )


def prepare(broker: Broker, shard: Shard) -> None:
    """Make the partitions of our own topics where there are several shards; a crash may have left some unmade.

    Raises InvalidConfiguration where the namespace has another number of them, or has topics of ours that do not belong
    together: then nothing is made.
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
    _check(shard.of, found)
    if several:
        for topic in INTERNAL_TOPICS:
            if topic not in found:
                broker.partition(topic, shard.of)
                _check(shard.of, {topic: broker.partitions(topic)})  # another service may have been first
        if known is None:
            record_shard_count(broker, shard.of)


def _check(shards: int, found: dict[str, int]) -> None:
    """`found`: partitions of those that are there, 0 of one without. A service with one shard makes none."""
    wanted = shards if shards > 1 else 0
    numbers = {*found.values()}
    if numbers <= {wanted}:
        return
    if len(numbers) == 1:
        has = max(numbers.pop(), 1)
        raise InvalidConfiguration(
            f"this namespace has {has} shards, which was settled when it was first served, not {shards}: "
            f"give --shards {has}"
        )
    facts = ", ".join(f"{topic} has {count or 'no'}" for topic, count in found.items())
    raise InvalidConfiguration(
        f"topics of ours have different numbers of partitions, which no service made: {facts}; delete the one that was "
        "made by hand, with `pulsar-admin topics delete` or `delete-partitioned-topic`, if no service has written to it"
    )


AT_ONCE = 16
"""Topics of a cluster that are recovered at the same time: each takes a dozen answers of it, one behind the other."""


class Identity(NamedTuple):
    """Who an owner is, for people, HOST:PORT where clients find it, or nothing, and what it owns."""

    owner: str
    address: str = ""
    shard: Shard = ONLY
    creates_topics: bool = True


class StandbyState(NamedTuple):
    """What a standby has when its turn comes: the decision log's only writer, and what the log says."""

    decisions: Writer
    log: DecisionLog


class OwnedLog(NamedTuple):
    """What an engine owns. `at`: where its own entry stands in the decision log; `inbox_end`: where those end.

    `name`: what tells its log from every other; `owners`: its newest owners, by epoch.
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
    """Become the owner of a shard of a broker. Raises what stands in the way; then nothing is owned.

    `now` is the time of the coordinator: seconds since 1970, never going back.
    """
    shard = identity.shard
    if standby_state is None:
        prepare(broker, shard)
    pool = ThreadPoolExecutor(AT_ONCE if isinstance(broker, PolicyBroker) else 1, "txnbuffer-recovery")
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
    writer, log = standby_state or fence(broker, shard.topic(DECISIONS))
    try:
        if (why := missing_owner_evidence(log.history)) is not None:
            raise DecisionsLost(log.topic, why)
        with _needed(log.topic):
            last = _nothing if isinstance(broker, PolicyBroker) else _last_id
            at = acquire_decisions(log, writer, identity, config.max_message_bytes, last)
        _check_same(broker, log.topic, at)
        _publish_address(broker, log.topic, OwnerAddress(log.history.epoch, identity.address, identity.creates_topics))
        inbox_end = _inbox_end(broker, shard)
        name = broker.incarnation(log.topic)
        with _needed(snapshots):
            # Whoever copies a directory can put the copy back; a cluster's topics are made anew at most.
            manager.recover("" if isinstance(broker, PolicyBroker) else secrets.token_hex(16))
        _check_whole(log, shard, manager)
        _begin_ids(broker, log, writer, clock)
        manager.check_registered(filter(shard.owns, log.history.topics))
    except BaseException:
        writer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        log.close()
    coordinator = Coordinator(shard.number, log.history.epoch, config, log.history, now())
    return OwnedLog(coordinator, writer, manager, at, inbox_end, name, log.history.owners)


def _check_same(broker: Broker, topic: str, at: Position) -> None:
    """Raises InvalidConfiguration where questions about a topic are answered by another cluster than has it."""
    if any(ledger.ledger == at.ledger and ledger.entries > at.entry for ledger in broker.ledgers(topic)):
        return
    raise InvalidConfiguration(
        f"what was just written to topic {topic!r}, at {at}, is unknown to the admin interface: are its address "
        "(admin_url) and that of the broker those of one cluster?"
    )


def _check_whole(log: DecisionLog, shard: Shard, manager: SnapshotManager) -> None:
    """Raises DecisionsLost where topics tell more than the decision log does."""
    buffers = {topic: manager.buffer(topic) for topic in manager.topics}
    lost = data_loss_evidence(log.history, log.history.epoch, shard.number, buffers)
    if lost is not None:
        raise DecisionsLost(log.topic, lost)


def _begin_ids(broker: Broker, log: DecisionLog, writer: Writer, clock: Clock) -> None:
    """Others may delete a namespace of a cluster and make it anew, while programs that wrote there go on."""
    first = initial_low_water_mark(log.history, clock.now_ms()) if isinstance(broker, PolicyBroker) else None
    if first is not None:
        writer.append(Batch.of([first])).result()
        log.history.apply(first)


def _inbox_end(broker: Broker, shard: Shard) -> Position | None:
    """Those that came before were for the owner before: whoever waits for an answer writes again."""
    if shard.of == 1:
        return None
    broker.create_topic(shard.topic(SHARD_MESSAGES))
    return broker.last_position(shard.topic(SHARD_MESSAGES))


def fence(broker: Broker, topic: str = DECISIONS) -> StandbyState:
    """Take a decision log from whoever has it."""
    return read_decisions(broker, topic, open_or_make(broker, topic, lambda: broker.writer(topic, exclusive=True)))


def read_decisions(broker: Broker, topic: str, writer: Writer) -> StandbyState:
    """What a decision log says, whose only writer is ours; closed if that can't be read."""
    try:
        with _needed(topic):
            return StandbyState(writer, DecisionLog(broker, topic))
    except BaseException:
        writer.close()
        raise


@contextlib.contextmanager
def _needed(topic: str) -> Iterator[None]:
    """Raises TopicDamaged where the log of one of our own topics is damaged: nothing can be decided without it."""
    try:
        yield
    except Damaged as error:
        raise TopicDamaged(topic, error, needed=True) from error


def _publish_address(broker: Broker, topic: str, owner: OwnerAddress) -> None:
    """Write the address where clients find it without reading the log."""
    if isinstance(broker, AnnotatedBroker):
        with contextlib.suppress(Error):
            broker.annotate(topic, encode_owner_address(owner))


def _last_id(history: History) -> int | None:
    """Where ids may have gone on in a log of which this is an older copy; None for one that is begun now."""
    return history.highest_id if history.owned else None


def _nothing(history: History) -> None:
    """A cluster's log is no copy."""


def acquire_decisions(
    log: DecisionLog,
    writer: Writer,
    identity: Identity,
    max_bytes: int,
    last: Callable[[History], int | None],
) -> Position:
    """Write our `owner` entry to the decision log and read up to it; where it stands. `last`: see `Acquisition`."""
    history = log.history
    drawn = secrets.token_hex(16)
    acquisition = Acquisition(
        identity.owner, history.epoch, identity.address, drawn, history.owners, max_bytes, last(history)
    )
    while True:
        at = writer.append(Batch.of([acquisition.entry()])).result().first
        if acquisition.read(log.read_to(at), log.history.owners, last(log.history)):
            log.history.epoch, log.history.owners = acquisition.epoch, {one.epoch: one for one in acquisition.owners}
            return at
