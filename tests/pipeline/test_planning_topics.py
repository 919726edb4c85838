"""Many topics are planned with one scan of their snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pipeline_world import Row, records_of, row_of, rows_read
from snapshot_driver import Interfering, abort_some, manager_on
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.memory import MemoryBroker
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.jobs.running import places
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.pinned import PinnedTopic, end_of_log, pin_topics
from txnbuffer.pipeline.planning import plan
from txnbuffer.pipeline.ranges import RangePlanner, after
from txnbuffer.pipeline.spark import source
from txnbuffer.pipeline.spark.source import StreamReader

TOPICS = [f"orders-{number}" for number in range(12)]


class Watched(Interfering):
    """Counts the calls on the snapshot topic."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.opened = 0
        self.before = self.count

    def count(self, name: str, topic: str) -> None:
        self.opened += name == "reader" and topic == SNAPSHOT_TOPIC

    def close(self) -> None: ...


@pytest.fixture
def broker() -> Iterator[Watched]:
    """Topics with two aborted transactions and two visible records; the last one has no transactions."""
    with MemoryBroker() as inner, manager_on(inner) as owner:
        for topic in TOPICS:
            log = TopicWriter(inner, topic)
            log.plain("a")
            if topic != TOPICS[-1]:
                owner.register(topic)
                abort_some(log, 1, 2)
            log.plain("b")
        yield Watched(inner)


def options(**more: str) -> ReadOptions:
    return ReadOptions.of({"broker": "file:log", "pattern": ".*", **more})


def test_a_plan_reads_the_snapshots_of_all_topics_once(broker: Watched) -> None:
    (task,) = plan(broker, options()).tasks
    assert broker.opened == 1
    assert sorted(one.topic for one in task) == sorted(TOPICS)


def test_a_stream_pins_all_topics_with_one_scan(broker: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "open_for_reading", lambda _: broker)
    reader = StreamReader(options())
    assert set(reader.initialOffset()["topics"]) == {*TOPICS}
    assert broker.opened == 1
    reader.stop()


def test_a_position_after_the_end_is_rejected_as_a_time_may_be_meant(broker: Watched) -> None:
    """A time of day looks like a position."""
    with pytest.raises(
        InvalidRequest, match=r"start is position 12:30, but topic orders-0 ends at .* a time requires a date"
    ):
        plan(broker, options(start="12:30"))
    end = end_of_log(broker, TOPICS[0])
    for more in ({"start": "12:30", "fail_on_data_loss": "false"}, {"start": json.dumps({"orders-0": str(end)})}):
        assert "orders-0" not in {one.topic for task in plan(broker, options(**more)).tasks for one in task}


def test_no_records_are_read_before_the_end_of_a_topic_that_was_empty(broker: Watched) -> None:
    """An audit reads up to the position where the export found the topic empty."""
    ends = places({TOPICS[0]: after(None), TOPICS[-1]: after(None)})
    read = {one.topic for task in plan(broker, options(end=ends)).tasks for one in task}
    assert read == {*TOPICS[1:-1]}


def test_topics_pinned_together_use_their_own_snapshots(broker: Watched) -> None:
    for topic, pinned in pin_topics(broker, TOPICS).items():
        assert pinned.registered == (topic != TOPICS[-1])
        rows = read(broker, pinned)
        assert rows == [row_of(record, seqno=pinned.registered) for record in records_of(broker.inner, topic)]
        assert [row[4] for row in rows] == [b"a", b"b"]


def test_a_topic_may_get_its_first_transaction_while_others_are_planned(broker: Watched) -> None:
    late, done = TOPICS[-1], []

    def interfere(name: str, topic: str) -> None:
        broker.count(name, topic)
        if topic == late and name == "last_position" and not done:
            done.append(True)
            with LogOwner(broker.inner) as owner:
                owner.recover()
                owner.register(late)
            abort_some(TopicWriter(broker.inner, late), 1)

    broker.before = interfere
    pinned = pin_topics(broker, TOPICS)[late]
    assert done
    assert broker.opened == 1
    assert pinned.registered
    assert [row[4] for row in read(broker, pinned)] == [b"a", b"b"]


def read(broker: Watched, pinned: PinnedTopic) -> list[Row]:
    planner = RangePlanner(numbered=True, target_bytes=10**6)
    ranges = planner.ranges(pinned.topic, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last)
    return rows_read(broker.inner, pinned, ranges)
