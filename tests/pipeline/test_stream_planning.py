"""Micro-batches: together they are what a committed reader gets, also if the query is stopped and started."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from golden_files import committed
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline.planned_queries import Query, SetClock, world
from pipeline_world import Life, Row, records_of, row_of
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from writing import TopicWriter

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer.errors import InvalidRequest, LogTruncated
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.offsets import Offset, ReadProgress
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.ranges import LedgerSize
from txnbuffer.pipeline.spark.source import StreamReader


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([None, 5, 20]))
def test_micro_batches_are_what_a_reader_gets(seed: int, limit: int | None) -> None:
    chance = random.Random(seed)
    more = {} if limit is None else {"max_messages_per_trigger": str(limit)}
    with world() as (broker, manager):
        lives = [Life(broker, manager, topic, seed + index) for index, topic in enumerate(["orders", "stock"])]
        query = Query(**more)
        planned = []
        for _ in range(12):
            for life in lives:
                life.run(chance.randint(0, 8))
            before = query.offset
            if query.trigger():
                planned.append((before, query.offset))
            if chance.random() < 0.3:
                query.restart()
            if len(lives) < 3 and chance.random() < 0.2:
                lives.append(Life(broker, manager, "later", seed))
        query.run_out()
        found: dict[str, list[Row]] = {life.topic: [] for life in lives}
        for row in query.rows:
            found[row[0]].append(row)
        numbered = limit is None
        for life in lives:
            expected = [row_of(record) for record in records_of(broker, life.topic)]
            got = found[life.topic]
            assert [without_seqno(row) for row in got] == [without_seqno(row) for row in expected]
            assert all(row[2] in (None, right[2]) for row, right in zip(got, expected, strict=True))
            assert not numbered or [row[2] for row in got] == [row[2] for row in expected]
        query.restart()
        again = [row for start, end in planned for row in query.read(start, end)]
        assert [without_seqno(row) for row in again] == [without_seqno(row) for row in query.rows[: len(again)]]


def without_seqno(row: Row) -> Row:
    return (*row[:2], *row[3:])


def test_topics_share_a_limit() -> None:
    with world() as (broker, manager):
        for topic, count in (("orders", 30), ("stock", 10)):
            life = Life(broker, manager, topic, 1)
            for _ in range(count):
                life.sent = {}
                life.plain()
            broker.roll(topic)
        query = Query()
        there = {topic: sum(one.entries for one in broker.ledgers(topic)) for topic in ("orders", "stock")}
        assert query.trigger(ReadMaxRows(8))
        topics = Offset.of_json(query.offset).topics
        shares = {topic: topics[topic].at.entry for topic in topics}
        assert sum(shares.values()) == 8
        assert shares["orders"] >= 8 * there["orders"] // sum(there.values())
        assert query.trigger(ReadAllAvailable())
        assert len(query.rows) == sum(len(records_of(broker, topic)) for topic in there)
        assert not query.trigger()


def test_available_now_ends_at_the_end_of_its_start() -> None:
    with world() as (broker, manager):
        life = Life(broker, manager, "orders", 1)
        life.plain()
        query = Query(max_messages_per_trigger="1")
        query.reader.prepareForTriggerAvailableNow()
        there = len(records_of(broker, "orders"))
        life.plain()
        Life(broker, manager, "later", 2).plain()
        while query.trigger():
            pass
        assert len(query.rows) == there
        query.run_out()
        assert len(query.rows) == len(records_of(broker, "orders")) + len(records_of(broker, "later"))


def test_trimmed_records_stop_a_query_unless_data_loss_is_allowed() -> None:
    with world() as (broker, manager):
        life = Life(broker, manager, "orders", 1)
        life.plain()
        query, careless = Query(), Query(fail_on_data_loss="false")
        query.run_out()
        broker.roll("orders")
        life.plain()
        life.snapshot()
        broker.trim("orders", broker.ledgers("orders")[-1].ledger)
        query.restart()
        assert query.trigger()  # it had read all trimmed records
        broker.roll("orders")
        life.plain()
        broker.roll("orders")
        life.plain()
        life.snapshot()
        broker.trim("orders", broker.ledgers("orders")[-1].ledger)
        query.restart()
        with pytest.raises(PositionTrimmed, match="orders begins with ledger"):
            query.trigger()
        careless.run_out()
        assert careless.rows == [row_of(record) for record in records_of(broker, "orders")]


def test_the_offset_leaves_a_ledger_read_to_its_end() -> None:
    with world() as (broker, manager):
        life = Life(broker, manager, "orders", 1)
        life.plain()
        query = Query()
        query.run_out()
        broker.roll("orders")
        life.snapshot()
        query.run_out()
        (reached,) = Offset.of_json(query.offset).topics.values()
        assert reached.at == Position(broker.ledgers("orders")[-1].ledger, 0)
        assert not query.trigger()
        life.plain()
        query.run_out()
        assert query.rows == [row_of(record) for record in records_of(broker, "orders")]


def write_and_trim(broker: MemoryBroker, life: Life) -> None:
    """Three ordinary records, of which all but the last are trimmed."""
    for _ in range(2):
        life.plain()
        broker.roll("orders")
    life.plain()
    life.snapshot()
    broker.trim("orders", broker.ledgers("orders")[-1].ledger)


@pytest.mark.parametrize("start", ["beginning", "end"])
def test_records_trimmed_from_a_topic_that_was_empty_are_detected(start: str) -> None:
    with world() as (broker, manager):
        broker.create_topic("orders")
        query, careless = Query(start=start), Query(start=start, fail_on_data_loss="false")
        assert not query.trigger()
        life = Life(broker, manager, "orders", 1)
        write_and_trim(broker, life)
        with pytest.raises(PositionTrimmed, match="orders begins with ledger"):
            query.trigger()
        careless.run_out()
        assert careless.rows == [row_of(record) for record in records_of(broker, "orders")]


def test_a_topic_without_progress_is_read_from_its_first_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster, where another ledger may replace the one of an empty topic."""
    ledgers = MemoryBroker.ledgers
    monkeypatch.setattr(
        MemoryBroker, "ledgers", lambda *of: [replace(one, lasting=one.entries > 0) for one in ledgers(*of)]
    )
    with world() as (broker, manager):
        broker.create_topic("orders")
        query, ending = Query(), Query(start="end")
        for one in (query, ending):
            assert not one.trigger()
            (reached,) = Offset.of_json(one.offset).topics.values()
            assert reached.at == EARLIEST
        life = Life(broker, manager, "orders", 1)
        life.plain()
        for one in (query, ending):
            one.run_out()
            assert one.rows == [row_of(record) for record in records_of(broker, "orders")]


def test_a_re_created_topic_is_another_one() -> None:
    with world() as (broker, manager):
        broker.create_topic("orders")
        query, careless = Query(), Query(fail_on_data_loss="false")
        broker.delete_topic("orders")
        life = Life(broker, manager, "orders", 1)
        life.plain()
        with pytest.raises(TopicNotFound, match="orders was deleted and created again"):
            query.trigger()
        careless.run_out()
        assert careless.rows == [row_of(record) for record in records_of(broker, "orders")]


@pytest.mark.parametrize("chosen", [{}, {"topics": "orders,stock"}])
def test_a_deleted_topic_stops_a_query_unless_data_loss_is_allowed(chosen: dict[str, str]) -> None:
    with world() as (broker, manager):
        lives = [Life(broker, manager, topic, 1) for topic in ("orders", "stock")]
        query, careless = Query(**chosen), Query(fail_on_data_loss="false", **chosen)
        for life in lives:
            life.plain()
        broker.delete_topic("orders")
        with pytest.raises(TopicNotFound, match="orders"):
            query.trigger()
        careless.run_out()
        assert careless.rows == [row_of(record) for record in records_of(broker, "stock")]
        TopicWriter(broker, "orders").plain("anew")
        careless.run_out()
        assert {row[0] for row in careless.rows} == {"orders", "stock"}


def test_a_query_does_not_start_with_a_missing_topic() -> None:
    with world(), pytest.raises(TopicNotFound, match="topic 'orders' does not exist"):
        Query(topics="orders", fail_on_data_loss="false")


def test_a_truncated_log_stops_a_query_unless_data_loss_is_allowed() -> None:
    with world() as (broker, manager):
        life = Life(broker, manager, "orders", 1)
        life.plain()
        query, careless = Query(), Query(fail_on_data_loss="false")
        for one in (query, careless):
            one.run_out()
            one.rows.clear()
            at = Position.parse(one.offset["topics"]["orders"]["at"])
            one.offset["topics"]["orders"]["at"] = str(at._replace(entry=at.entry + 7))
        with pytest.raises(LogTruncated, match=f"orders ends at {at}"):
            query.trigger()
        assert careless.trigger()
        assert careless.rows == []
        read = len(records_of(broker, "orders"))
        life.plain()
        with pytest.raises(LogTruncated, match="orders"):
            query.trigger()
        careless.run_out()
        assert careless.rows == [row_of(record) for record in records_of(broker, "orders")[read:]]


@pytest.mark.parametrize("start", ["7:0", '{"orders": "7:0"}'])
def test_a_query_can_not_start_after_the_end(start: str) -> None:
    with world() as (broker, manager):
        Life(broker, manager, "orders", 1).plain()
        with pytest.raises(InvalidRequest, match="option start is position 7:0, but topic orders ends at"):
            Query(start=start)


def test_records_before_the_start_time_are_not_read() -> None:
    clock = SetClock()
    with world(clock) as (broker, manager):
        life = Life(broker, manager, "orders", 1)
        life.plain()
        query = Query(start=datetime.fromtimestamp(clock.seconds + 3600, UTC).isoformat())
        for _ in range(2):
            life.plain()
            assert not query.trigger()
            query.restart()
        early = len(records_of(broker, "orders"))
        clock.seconds += 3600
        life.plain()
        query.run_out()
        clock.seconds -= 1800
        life.plain()
        query.run_out()
        late = records_of(broker, "orders")[early:]
        assert [row[1] for row in query.rows] == [tuple(record.position) for record in late]


def test_trimmed_records_after_the_start_time_are_detected() -> None:
    clock = SetClock()
    with world(clock) as (broker, manager):
        life = Life(broker, manager, "orders", 1)
        life.plain()
        query = Query(start=datetime.fromtimestamp(clock.seconds + 3600, UTC).isoformat())
        clock.seconds += 3600
        write_and_trim(broker, life)
        with pytest.raises(PositionTrimmed, match="orders begins with ledger"):
            query.trigger()


@pytest.mark.parametrize(("option", "text"), [("end", "3:4"), ("latest", "true")])
def test_some_options_are_for_batches(option: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"option {option} is for batch queries"):
        StreamReader(ReadOptions.of({"broker": "file:log", "topics": "orders", option: text}))


def test_golden_offset() -> None:
    offset = Offset(
        {"orders": ReadProgress(Position(3, 17), "9f3c", 121), "flüge": ReadProgress(Position(1, 0), "00aa")}
    )
    found = committed("pipeline/offset-1.json", json.dumps(offset.to_json()).encode())
    assert Offset.of_json(json.loads(found)) == offset


def test_golden_offset_of_a_future_time() -> None:
    offset = Offset({"orders": ReadProgress(Position(3, 17), "9f3c", since=1_790_000_000_000)})
    found = committed("pipeline/offset-1-since.json", json.dumps(offset.to_json()).encode())
    assert Offset.of_json(json.loads(found)) == offset


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        {"version": 2, "topics": {}},
        {"version": 1, "topics": 3},
        {"version": 1, "topics": {"a": {"at": "x", "incarnation": ""}}},
        {"version": 1, "topics": {"a": {"at": "1:2"}}},
        {"version": 1, "topics": {"a": {"at": "1:2", "incarnation": "x", "seqno": "7"}}},
        {"version": 1, "topics": {"a": {"at": "1:2", "incarnation": "x", "seqno": True}}},
        {"version": 1, "topics": {"a": {"at": "1:2", "incarnation": "x", "since": 7.5}}},
    ],
)
def test_the_error_names_an_invalid_offset(found: Any) -> None:
    with pytest.raises(InvalidRequest, match="the checkpoint of the query"):
        Offset.of_json(found)


def test_a_range_of_ledgers_is_counted_in_messages() -> None:
    from txnbuffer.pipeline.ranges import advanced

    ledgers = [LedgerSize(1, 4, 0), LedgerSize(3, 5, 0)]
    assert advanced(ledgers, Position(1, 1), Position(3, 2), 2) == (Position(1, 3), 2)
    assert advanced(ledgers, Position(1, 1), Position(3, 2), 3) == (Position(1, 4), 3)
    assert advanced(ledgers, Position(1, 1), Position(3, 2), 4) == (Position(3, 1), 4)
    assert advanced(ledgers, Position(1, 1), Position(3, 2), 100) == (Position(3, 2), 5)
    assert advanced(ledgers, Position(1, 4), Position(1, 4), 5) == (Position(1, 4), 0)
