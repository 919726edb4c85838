"""The owner keeps the snapshot topic at a steady size, and the compacted topic recovers as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.errors import DiskFull
from broker_io.memory import MemoryBroker
from snapshots import writer as writer_module
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.model import TxnId
from txnbuffer.recovery.verify import Level, verify


def write_aborts(manager: LogOwner, log: TopicWriter, first: int, count: int) -> None:
    for txn in range(first, first + count):
        log.records(txn, "x")
        log.abort(txn)
        manager.pump()
        manager.snapshot("orders")


def test_the_snapshot_topic_keeps_a_steady_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "COMPACT_BYTES", 20_000)
    address = f"file:{tmp_path / 'log'}"
    with open_broker(address) as broker, LogOwner(broker, segment_size=10) as manager:
        manager.recover()
        manager.register("orders")
        log = TopicWriter(broker, "orders")
        sizes = []
        for first in range(1, 200, 50):
            write_aborts(manager, log, first, 50)
            sizes.append(sum(ledger.bytes for ledger in broker.ledgers(SNAPSHOT_TOPIC)))
        assert max(sizes) < 60_000
        assert manager.notes == []
    with open_broker(address) as broker, LogOwner(broker) as manager:
        manager.recover()
        assert len(manager.buffer("orders").aborted) == 200
        assert all(manager.buffer("orders").is_aborted(TxnId(0, txn)) for txn in (1, 100, 200))
        assert {finding.level for finding in verify(broker)} == {Level.OK}


def test_a_compaction_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "COMPACT_BYTES", 1)
    with MemoryBroker() as broker, LogOwner(broker) as manager:

        def compact(topic: str) -> None:
            raise DiskFull(f"no space to compact {topic}")

        monkeypatch.setattr(broker, "compact", compact)
        manager.recover()
        manager.register("orders")
        assert any("could not be compacted: no space" in note for note in manager.notes)
        assert manager.topics == ["orders"]
