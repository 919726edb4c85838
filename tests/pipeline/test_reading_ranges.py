"""Tasks read from a log, with any ranges, what a committed reader gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from file_logs import World
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_world import Life, filter_of, records_of, row_of, rows_read
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.compaction import CompactionRequest
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from snapshots.errors import SnapshotMissing
from txnbuffer import recordset
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.errors import LogTruncated
from txnbuffer.model import Position
from txnbuffer.pipeline import reading
from txnbuffer.pipeline.pinned import PinnedTopic, pin_topics
from txnbuffer.pipeline.ranges import RangePlanner, RecordRange
from txnbuffer.pipeline.reading import RecordFilter, read_range
from txnbuffer.recovery.restore import LoadedTopic, SnapshotLoader, load

TOPIC = "orders"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with MemoryBroker() as broker:
        yield broker


@pytest.fixture
def manager(broker: Broker) -> Iterator[LogOwner]:
    with LogOwner(broker) as manager:
        manager.recover()
        yield manager


def targets() -> st.SearchStrategy[int]:
    return st.sampled_from([1, 40, 300, 10**6])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), target=targets(), numbered=st.booleans(), together=st.sampled_from([1, 10**6]))
def test_any_ranges_give_what_a_reader_gets(seed: int, target: int, numbered: bool, together: int) -> None:
    with (
        MemoryBroker() as broker,
        LogOwner(broker, segment_size=2) as manager,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(recordset, "TOGETHER_BYTES", together)
        manager.recover()
        Life(broker, manager, TOPIC, seed).run(40)
        pinned = pin(broker, TOPIC)
        expected = records_of(broker, TOPIC)
        ranges = RangePlanner(numbered, target).ranges(
            TOPIC, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last
        )  # fmt: skip
        found = rows_read(broker, pinned, ranges)
        assert found == [row_of(record, seqno=numbered) for record in expected]
        some = [one for one in ranges if one.seqno is not None]
        assert len(some) == (len(ranges) if numbered else 0)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), target=targets(), numbered=st.booleans(), data=st.data())
def test_any_range_of_a_log_gives_its_records(seed: int, target: int, numbered: bool, data: st.DataObject) -> None:
    with MemoryBroker() as broker, LogOwner(broker, segment_size=2) as manager:
        manager.recover()
        Life(broker, manager, TOPIC, seed).run(30)
        pinned = pin(broker, TOPIC)
        expected = [row_of(record, seqno=numbered) for record in records_of(broker, TOPIC)]
        places = [Position(*row[1]) for row in expected] + [pinned.stop, Position(2, 0), Position(1, 5, 2)]
        first, stop = sorted([data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))])
        first, stop = max(first, pinned.origin), min(stop, pinned.stop)
        ranges = RangePlanner(numbered, target).ranges(TOPIC, pinned.ledgers, pinned.anchors, first, stop)
        assert rows_read(broker, pinned, ranges) == [row for row in expected if first <= Position(*row[1]) < stop]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), target=targets())
def test_outcomes_of_all_records(seed: int, target: int) -> None:
    with MemoryBroker() as broker, LogOwner(broker) as manager:
        manager.recover()
        Life(broker, manager, TOPIC, seed).run(30)
        pinned = pin(broker, TOPIC)
        visible = {record.position: record for record in records_of(broker, TOPIC)}
        everything = [r for r in records_of(broker, TOPIC, isolation="read_uncommitted") if r.position < pinned.stop]
        ranges = RangePlanner(True, target).ranges(
            TOPIC, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last
        )
        found = rows_read(broker, pinned, ranges, keep_hidden=True)
        assert [row[:-1] for row in found] == [row_of(visible.get(r.position, r)) for r in everything]
        for record, row in zip(everything, found, strict=True):
            assert (row[-1] == "committed") == (record.position in visible)
            assert row[-1] != "aborted" or record.txn in pinned.visibility.aborted
            assert row[-1] != "suppressed" or pinned.visibility.suppressed.count(record.position, 1)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), target=targets())
def test_ranges_of_a_compacted_log_have_no_emptied_records(seed: int, target: int) -> None:
    with World().own(compacted_prefix="__txnbuffer") as broker, LogOwner(broker, segment_size=2) as manager:
        manager.recover()
        Life(broker, manager, TOPIC, seed).run(40)
        pinned = pin(broker, TOPIC)
        before = records_of(broker, TOPIC)
        ranges = RangePlanner(True, target).ranges(
            TOPIC, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last
        )
        compact(broker, pinned)
        left = records_of(broker, TOPIC)
        assert [one for one in before if one in left] == left
        assert rows_read(broker, pinned, ranges) == [row_of(record) for record in left]
        everything = records_of(broker, TOPIC, isolation="read_uncommitted")
        uncommitted = rows_read(broker, pinned, ranges, isolated=False)
        assert [row[1] for row in uncommitted] == [tuple(r.position) for r in everything if r.position < pinned.stop]
        hidden = {row[1] for row in rows_read(broker, pinned, ranges, keep_hidden=True)}
        assert hidden == {row[1] for row in uncommitted}


def compact(broker: FileBroker, pinned: PinnedTopic) -> None:
    """Compact all closed ledgers that are wholly decided."""
    limit = pinned.visibility.max_read_position
    upto = 0
    for ledger in broker.ledgers(TOPIC)[:-1]:
        if limit is not None and (not ledger.entries or limit >= Position(ledger.ledger, ledger.entries - 1, -1)):
            upto = ledger.ledger
    broker.compact_records(TOPIC, CompactionRequest(upto, TransactionRules(pinned.visibility)))


def test_records_of_a_topic_without_transactions_have_no_seqnos(broker: Broker) -> None:
    broker.create_topic(TOPIC)
    with broker.writer(TOPIC) as writer:
        writer.append(Batch.of([Message(b"k", b"1"), Message(b"k", None)])).result(60)
    pinned = pin(broker, TOPIC)
    assert not pinned.registered
    assert rows_read(broker, pinned, whole(pinned)) == [
        row_of(record, seqno=False) for record in records_of(broker, TOPIC)
    ]


def test_an_epoch_marker_without_a_snapshot_is_no_error(broker: Broker) -> None:
    log = TopicWriter(broker, TOPIC)
    log.commit()
    log.plain("a")
    pinned = pin(broker, TOPIC)
    (record,) = records_of(broker, TOPIC)
    assert rows_read(broker, pinned, whole(pinned)) == [row_of(record, seqno=False)]


def test_transactions_without_a_snapshot_are_an_error(broker: Broker) -> None:
    log = TopicWriter(broker, TOPIC)
    log.records(1, "a")
    pinned = pin(broker, TOPIC)
    with pytest.raises(SnapshotMissing, match=TOPIC):
        rows_read(broker, pinned, whole(pinned))


def test_a_topic_may_get_its_first_transaction_while_it_is_planned(
    broker: Broker, manager: LogOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TopicWriter(broker, TOPIC)
    log.plain("1")

    def load_and_continue(_: SnapshotLoader, topic: str) -> LoadedTopic:
        loaded = load(broker, topic)
        manager.register(topic)
        log.records(1, "2")
        log.abort(1)
        return loaded

    monkeypatch.setattr(SnapshotLoader, "load", load_and_continue)
    pinned = pin(broker, TOPIC)
    assert [row[4] for row in rows_read(broker, pinned, whole(pinned))] == [b"1"]


def test_records_trimmed_during_reading_fail_or_are_skipped(broker: Broker, manager: LogOwner) -> None:
    manager.register(TOPIC)
    log = TopicWriter(broker, TOPIC)
    for value in ("1", "2", "3"):
        log.plain(value)
        broker.roll(TOPIC)
    pinned = pin(broker, TOPIC)
    ranges = RangePlanner(numbered=True, target_bytes=10**6).ranges(
        TOPIC, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last
    )
    record_filter = filter_of(pinned)
    broker.trim(TOPIC, pinned.ledgers[1].ledger)
    with pytest.raises(PositionTrimmed, match=TOPIC):
        list(read_range(broker, ranges[0], record_filter))
    (two, three) = read_range(broker, ranges[0], record_filter, fail_on_data_loss=False)
    assert [two.placed.messages.values[0], three.placed.messages.values[0]] == [b"2", b"3"]
    assert two.seqnos is None
    assert three.seqnos is None


@pytest.fixture
def planned(broker: Broker, manager: LogOwner) -> tuple[RecordRange, RecordFilter]:
    """A planned range of six records, none of which has been read."""
    manager.register(TOPIC)
    log = TopicWriter(broker, TOPIC)
    for value in "123456":
        log.plain(value)
    pinned = pin(broker, TOPIC)
    return whole(pinned)[0], filter_of(pinned)


def test_a_topic_re_created_after_planning_is_not_read(
    broker: Broker, manager: LogOwner, planned: tuple[RecordRange, RecordFilter]
) -> None:
    broker.delete_topic(TOPIC)
    with pytest.raises(TopicNotFound, match=TOPIC):
        list(read_range(broker, *planned))
    log = TopicWriter(broker, TOPIC)
    for value in "abcdef":
        log.records(1, value)
    log.abort(1)
    with pytest.raises(TopicNotFound, match="deleted and created again"):
        list(read_range(broker, *planned))
    assert not [*read_range(broker, *planned, fail_on_data_loss=False)]


def test_a_re_created_topic_with_the_same_positions_is_not_read(
    broker: Broker, planned: tuple[RecordRange, RecordFilter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "incarnation", lambda topic: "another")
    with pytest.raises(TopicNotFound, match="deleted and created again"):
        list(read_range(broker, *planned))


def test_a_topic_re_created_during_reading_is_an_error(
    broker: Broker, planned: tuple[RecordRange, RecordFilter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_ROWS", 2)
    rows = read_range(broker, *planned)
    assert next(rows).placed.messages.values[0] == b"1"
    broker.delete_topic(TOPIC)
    log = TopicWriter(broker, TOPIC)
    for value in "abcdef":
        log.plain(value)
    with pytest.raises(TopicNotFound, match=TOPIC):
        list(rows)


def test_a_range_trimmed_completely_has_no_records(broker: Broker, planned: tuple[RecordRange, RecordFilter]) -> None:
    broker.roll(TOPIC)
    broker.trim(TOPIC, broker.ledgers(TOPIC)[-1].ledger)
    with pytest.raises(PositionTrimmed, match=TOPIC):
        list(read_range(broker, *planned))
    assert not [*read_range(broker, *planned, fail_on_data_loss=False)]


def test_a_log_that_lost_its_end_is_an_error(
    broker: Broker, planned: tuple[RecordRange, RecordFilter], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, record_filter = planned
    longer = replace(one, stop=Position(one.stop.ledger, one.stop.entry + 3), last=None)
    monkeypatch.setattr(reading, "DOUBT", 0.0)
    with pytest.raises(LogTruncated, match=f"topic {TOPIC} ends at {one.stop}, .* up to {longer.stop}"):
        list(read_range(broker, longer, record_filter))
    (rows,) = read_range(broker, longer, record_filter, fail_on_data_loss=False)
    assert len(rows) == 6


def test_an_open_transaction_hides_later_records(broker: Broker, manager: LogOwner) -> None:
    manager.register(TOPIC)
    log = TopicWriter(broker, TOPIC)
    log.plain("1")
    log.records(1, "2")
    log.plain("3")
    before = pin(broker, TOPIC)
    log.commit(1)
    assert [row[4] for row in rows_read(broker, before, whole(before))] == [b"1"]
    after = pin(broker, TOPIC)
    assert [row[4] for row in rows_read(broker, after, whole(after))] == [b"1", b"2", b"3"]
    uncommitted = pin(broker, TOPIC, isolated=False)
    log.records(2, "4")
    assert [row[4] for row in rows_read(broker, uncommitted, whole(uncommitted), isolated=False)] == [b"1", b"2", b"3"]


def pin(broker: Broker, topic: str, *, isolated: bool = True) -> PinnedTopic:
    return pin_topics(broker, [topic], isolated=isolated)[topic]


def whole(pinned: PinnedTopic) -> list[RecordRange]:
    planner = RangePlanner(numbered=False, target_bytes=10**9)
    return planner.ranges(pinned.topic, pinned.ledgers, pinned.anchors, pinned.origin, pinned.stop, pinned.last)
