"""A cluster that crashed may write a run of the snapshot topic again, and not to its end: nothing changes by it."""

from __future__ import annotations

import pytest
from writing import TopicWriter

from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST
from snapshots import scan
from snapshots.keys import SNAPSHOT_TOPIC
from txnbuffer.recovery.manager import SnapshotManager

T = "orders"


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("count", range(1, 5))
def test_any_part_of_the_last_write_may_stand_there_twice(
    monkeypatch: pytest.MonkeyPatch, first: int, count: int, compacted: bool
) -> None:
    monkeypatch.setattr(scan, "END_TIMEOUT", 0.01)
    with MemoryBroker() as broker:
        writer = TopicWriter(broker, T)
        keeper = SnapshotManager(broker, segment_size=2)
        keeper.recover()
        keeper.register(T)
        for txn in range(1, 8):
            writer.records(txn, "v")
            writer.abort(txn)
        keeper.pump()
        before = broker.last_position(SNAPSHOT_TOPIC) or EARLIEST
        keeper.snapshot(T)
        with broker.reader(SNAPSHOT_TOPIC, before, inclusive=False) as reader:
            placed = reader.read()
        assert placed is not None
        assert len(placed) == 4  # three parts and the end
        last = min(first + count, len(placed)) - 1
        broker.repeat(SNAPSHOT_TOPIC, placed.positions[first], placed.positions[last])
        if compacted:
            broker.compact(SNAPSHOT_TOPIC)
        with SnapshotManager(broker, segment_size=2) as again:
            again.recover()
            assert (again.problems, again.notes) == ({}, [])
            assert len(again.buffer(T).aborted) == 7
