"""A topic in memory with an owner, and a cluster that may compact the target of its relay."""

from __future__ import annotations

import itertools
from typing import Any

from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.environment import Environment, use
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.testing import SimulatedDisk
from txnbuffer.recovery.audit import CommittedLog, KeyAudit, audit
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import OwnedTarget
from txnbuffer.sinks.relayed_copy import RelayedCopy

T, CLEAN = "orders", "clean"


class Relayed:
    """A topic with an owner, and a cluster that may compact the relay's target."""

    def __init__(self, *, registered: bool = True) -> None:
        self.cluster = MemoryBroker()
        self.far = MemoryBroker(ledger_entries=3, compacted_prefix="")
        self.log = TopicWriter(self.cluster, T)
        self.manager = LogOwner(self.cluster.connect())
        self.manager.recover()
        if registered:
            self.manager.register(T)
        self.numbers = itertools.count(1)

    def write(self, key: str | None, value: str | None, *, commit: bool = True) -> None:
        txn = next(self.numbers)
        self.log.records(txn, value, key=key)
        (self.log.commit if commit else self.log.abort)(txn)
        self.manager.pump()

    def relay(self, **options: Any) -> None:
        target = OwnedTarget(self.far.connect, CLEAN)
        Relay(self.cluster.connect, T, target, max_unavailable=20.0, **options).run(follow=False)

    def change(self, number: int, value: bytes | None) -> None:
        """Write the copy again with another value of one message."""
        with self.far.connect() as broker:
            with broker.reader(CLEAN) as reader:
                rows = [row.message for placed in iter(reader.read, None) for row in placed]
            broker.delete_topic(CLEAN)
            broker.create_topic(CLEAN)
            rows[number] = rows[number]._replace(value=value)
            append(broker, *rows)

    def audit(self, *, compacted: bool = True, **options: Any) -> KeyAudit:
        disk = SimulatedDisk()
        disk.make_directory("/scratch")
        with self.cluster.connect() as mine, self.far.connect() as other, use(Environment(disk=disk)):
            copy = RelayedCopy(other, CLEAN, T, mine.incarnation(T), compacted=compacted)
            return audit(CommittedLog(mine, T), copy, "/scratch", **options)


def append(broker: Broker, *rows: Message) -> None:
    with broker.writer(CLEAN) as writer:
        for row in rows:
            writer.append(Batch.of([row])).result(120)
