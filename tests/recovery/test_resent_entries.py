"""A crashed cluster may write a slice of the snapshot topic again, perhaps not to its end: nothing changes."""

from __future__ import annotations

import pytest
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import compacted as compacted_topics
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST
from snapshots.format import SNAPSHOT_TOPIC

T = "orders"


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("count", range(1, 5))
def test_any_slice_of_the_last_write_may_be_in_the_topic_twice(
    monkeypatch: pytest.MonkeyPatch, first: int, count: int, compacted: bool
) -> None:
    monkeypatch.setattr(compacted_topics, "END_TIMEOUT", 0.01)
    with MemoryBroker() as broker:
        writer = TopicWriter(broker, T)
        manager = LogOwner(broker, segment_size=2)
        manager.recover()
        manager.register(T)
        for txn in range(1, 8):
            writer.records(txn, "v")
            writer.abort(txn)
        manager.pump()
        before = broker.last_position(SNAPSHOT_TOPIC) or EARLIEST
        manager.snapshot(T)
        with broker.reader(SNAPSHOT_TOPIC, before, inclusive=False) as reader:
            placed = reader.read()
        assert placed is not None
        assert len(placed) == 4  # three segments and the end
        last = min(first + count, len(placed)) - 1
        broker.repeat(SNAPSHOT_TOPIC, placed.positions[first], placed.positions[last])
        if compacted:
            broker.compact(SNAPSHOT_TOPIC)
        with LogOwner(broker, segment_size=2) as again:
            again.recover()
            assert (again.problems, again.notes) == ({}, [])
            assert len(again.buffer(T).aborted) == 7
