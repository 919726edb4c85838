"""A reader that falls silent before the end proves nothing: another one is asked before anything is concluded."""

from __future__ import annotations

import pytest
from writing import TopicWriter

from broker_io.memory import MemoryBroker
from broker_io.memory.reader import MemoryReader
from snapshots.keeper import BufferKeeper
from snapshots.keys import SNAPSHOT_TOPIC
from snapshots.loading import load
from snapshots.table import scan


def test_a_dead_reader_hides_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker, BufferKeeper(broker) as keeper:
        keeper.recover()
        keeper.register("orders")
        log = TopicWriter(broker, "orders")
        log.records(1, "x")
        log.abort(1)
        keeper.pump()
        keeper.snapshot("orders")
        honest = MemoryReader.read
        silent: list[MemoryReader] = []

        def read(self: MemoryReader, **options: float) -> object:
            # The first reader says nothing, as one of Pulsar may that lost its broker.
            if not silent:
                silent.append(self)
            return None if self is silent[0] else honest(self, **options)  # type: ignore[arg-type]  # as they come

        monkeypatch.setattr(MemoryReader, "read", read)
        assert scan(broker, SNAPSHOT_TOPIC).topics["orders"].end is not None
        silent.clear()
        assert load(broker, "orders").registered
