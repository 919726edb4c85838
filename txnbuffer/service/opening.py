"""How an engine takes over: the decision log, the buffers of all topics, the coordinator. It waits for the broker."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from broker_io.batch import Batch
from broker_io.environment import Clock
from broker_io.errors import Error
from broker_io.port import Broker, GuardedBroker, NotingBroker, Writer, open_or_make
from broker_io.position import Position
from snapshots.keeper import BufferKeeper
from snapshots.policy import SnapshotPolicy
from txnbuffer.coordinator.config import Config
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.entries import TOPIC
from txnbuffer.coordinator.ownership import Acquisition
from txnbuffer.coordinator.whereabouts import Whereabouts, encode_note
from txnbuffer.service.decision_log import DecisionLog

SHARD = 0
AT_ONCE = 16
"""Topics of a cluster that are recovered at the same time: each takes a dozen answers of it, one behind the other."""


class Identity(NamedTuple):
    """Who an owner is, for people, and HOST:PORT where clients find it, or nothing."""

    owner: str
    address: str = ""


class Standing(NamedTuple):
    """What a standby has when its turn comes: the decision log's only writer, and what the log says."""

    decisions: Writer
    log: DecisionLog


class Opened(NamedTuple):
    """What an engine owns. `at`: where its own entry stands in the decision log."""

    coordinator: Coordinator
    decisions: Writer
    keeper: BufferKeeper
    at: Position


def take_over(
    broker: Broker,
    identity: Identity,
    config: Config,
    policy: SnapshotPolicy,
    clock: Clock,
    standing: Standing | None = None,
) -> Opened:
    """Become the owner of everything in a broker. Raises what stands in the way; then nothing is owned."""
    pool = ThreadPoolExecutor(AT_ONCE if isinstance(broker, GuardedBroker) else 1, "txnbuffer-recovery")
    keeper = BufferKeeper(broker, clock=clock, policy=policy, each=pool.map)
    writer, log = standing or fence(broker)
    try:
        at = acquire_decisions(log, writer, identity)
        _note(broker, Whereabouts(log.history.epoch, identity.address))
        keeper.recover()
        keeper.expect(log.history.topics)
    except BaseException:
        writer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        log.close()
    coordinator = Coordinator(SHARD, log.history.epoch, config, log.history, clock.now_ms() / 1000)
    return Opened(coordinator, writer, keeper, at)


def fence(broker: Broker) -> Standing:
    """Take the decision log from whoever has it."""
    writer = open_or_make(broker, TOPIC, lambda: broker.writer(TOPIC, exclusive=True))
    try:
        return Standing(writer, DecisionLog(broker))
    except BaseException:
        writer.close()
        raise


def _note(broker: Broker, whereabouts: Whereabouts) -> None:
    """Clients need not read the whole log then; without the note they do."""
    if isinstance(broker, NotingBroker):
        with contextlib.suppress(Error):
            broker.note(TOPIC, encode_note(whereabouts))


def acquire_decisions(log: DecisionLog, writer: Writer, identity: Identity) -> Position:
    """Write our `owner` entry to the decision log and read up to it; where it stands."""
    acquisition = Acquisition(identity.owner, log.history.epoch, identity.address)
    while True:
        at = writer.append(Batch.of([acquisition.entry()])).result().first
        if acquisition.read(log.read_to(at)):
            log.history.epoch = acquisition.epoch
            return at
