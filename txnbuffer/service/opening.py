"""How an engine takes over: the decision log, the buffers of all topics, the coordinator. It waits for the disk."""

from __future__ import annotations

from typing import NamedTuple

from broker_io.batch import Batch
from broker_io.environment import Clock
from broker_io.port import Broker, Reader, Writer
from broker_io.position import EARLIEST, Position
from snapshots.keeper import BufferKeeper
from snapshots.policy import SnapshotPolicy
from txnbuffer.coordinator.config import Config
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.entries import TOPIC, Owner, decode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.ownership import Acquisition

SHARD = 0
READ_TIMEOUT = 30.0
"""Seconds in which a message that the decision log says it holds must be read."""


class Opened(NamedTuple):
    """What an engine owns."""

    coordinator: Coordinator
    decisions: Writer
    keeper: BufferKeeper


def take_over(broker: Broker, owner: str, config: Config, policy: SnapshotPolicy, clock: Clock) -> Opened:
    """Become the owner of everything in a broker. Raises what stands in the way; then nothing is owned."""
    keeper = BufferKeeper(broker, clock=clock, policy=policy)
    broker.create_topic(TOPIC)
    writer = broker.writer(TOPIC, exclusive=True)
    try:
        history = acquire_decisions(broker, writer, owner)
        keeper.recover()
    except BaseException:
        writer.close()
        raise
    return Opened(Coordinator(SHARD, history.epoch, config, history, clock.now_ms() / 1000), writer, keeper)


def acquire_decisions(broker: Broker, writer: Writer, owner: str) -> History:
    """Write our `owner` entry to the decision log; what the log holds up to it."""
    with broker.reader(TOPIC) as reader:
        history = History()
        end = broker.last_position(TOPIC)
        _read(reader, history, EARLIEST if end is None else end, own=False)
        acquisition = Acquisition(owner, history.epoch)
        while True:
            at = writer.append(Batch.of([acquisition.entry()])).result().first
            if acquisition.read(_read(reader, history, at, own=True)):
                history.epoch = acquisition.epoch
                return history


def _read(reader: Reader, history: History, end: Position, *, own: bool) -> int:
    """Read up to `end`, of which `own` says that it is our entry; the highest epoch of other owners' entries."""
    at, highest = EARLIEST, 0
    while at < end:
        placed = reader.read(timeout=READ_TIMEOUT)
        if placed is None:
            raise TimeoutError(f"{TOPIC} ends at {end}, but nothing came behind {at} within {READ_TIMEOUT:.0f} s")
        for position, _, message in placed:
            if own and position == end:
                break
            history.apply(message)
            if own and isinstance(entry := decode(message), Owner):
                highest = max(highest, entry.epoch)
        at = placed.positions.last
    return highest
