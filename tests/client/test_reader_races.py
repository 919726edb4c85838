"""The committed reader while topics are trimmed and registered concurrently."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from snapshot_driver import Interfering, abort_some, forget_origins, manager_on
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.errors import PositionTrimmed, ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.testing.disk import SimulatedClock
from snapshots.errors import SnapshotMissing
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.client.reading import followers
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.records import Record
from txnbuffer.errors import ReplayStalled
from txnbuffer.model import Position, TxnId
from txnbuffer.recordset import pack

T = "orders"


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with MemoryBroker() as broker:
        yield broker


@pytest.fixture
def unaware(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """A broker that does not know whether a log was trimmed, as a cluster."""
    forget_origins(monkeypatch)
    return broker


def drain(reader: CommittedReader) -> list[tuple[int | None, str]]:
    records: list[Record] = []
    while (batch := reader.read()) is not None:
        records += batch
    return [(record.seqno, (record.value or b"").decode()) for record in records]


def owned(broker: Broker, topic: str = T) -> tuple[LogOwner, TopicWriter]:
    owner = manager_on(broker, segment_size=2)
    owner.register(topic)
    return owner, TopicWriter(broker, topic)


def trimming(broker: MemoryBroker, owner: LogOwner, log: TopicWriter, *, times: int) -> Interfering:
    """A broker that loses the first ledgers each time somebody begins to read the topic."""
    between = Interfering(broker)
    left = [times]

    def before(name: str, topic: str) -> None:
        if (name, topic) == ("reader", T) and left[0]:
            left[0] -= 1
            broker.roll(T)
            log.plain("new")
            owner.pump()
            for _ in range(2):
                owner.snapshot(T)
            assert owner.trim(T, 10**6) > 1

    between.before = before
    return between


@pytest.mark.parametrize("times", [1, 3])
def test_trim_before_the_first_read_is_no_gap_from_the_beginning(broker: MemoryBroker, times: int) -> None:
    owner, log = owned(broker)
    log.plain("a", "b")
    owner.pump()
    with CommittedReader(trimming(broker, owner, log, times=times), T) as reader:
        assert drain(reader) == [(times + 2, "new")]


def test_opening_fails_if_the_topic_is_trimmed_again_and_again(broker: MemoryBroker) -> None:
    owner, log = owned(broker)
    log.plain("a")
    owner.pump()
    between = trimming(broker, owner, log, times=100)
    with pytest.raises(PositionTrimmed), CommittedReader(between, T) as reader:
        drain(reader)
    assert broker.ledgers(T)[0].ledger < 20


def test_trim_before_the_first_read_is_a_gap_from_a_position(broker: MemoryBroker) -> None:
    owner, log = owned(broker)
    start = log.plain("a", "b").first
    owner.pump()
    with (
        pytest.raises(PositionTrimmed),
        CommittedReader(trimming(broker, owner, log, times=1), T, start=start) as reader,
    ):
        drain(reader)


def test_trim_before_the_start_position_is_no_gap(broker: MemoryBroker) -> None:
    owner, log = owned(broker)
    log.plain("a", "b")
    owner.pump()
    broker.roll(T)
    start = log.plain("c").first
    with CommittedReader(trimming(broker, owner, log, times=1), T, start=start) as reader:
        broker.trim(T, start.ledger)
        with pytest.raises(PositionTrimmed):
            drain(reader)
    broker.roll(T)
    end = log.plain("e").first
    with CommittedReader(broker, T, start=Position(end.ledger, 0)) as reader:
        broker.trim(T, end.ledger)
        assert [value for _, value in drain(reader)] == ["e"]


def test_trim_after_the_first_read_is_a_gap(broker: MemoryBroker) -> None:
    _, log = owned(broker)
    log.plain("a")
    with CommittedReader(broker, T) as reader:
        assert drain(reader) == [(1, "a")]
        for value in "bcd":
            broker.roll(T)
            log.plain(value)
        broker.trim(T, 10**6)
        with pytest.raises(PositionTrimmed):
            drain(reader)


@pytest.mark.parametrize("start", ["beginning", "end"])
def test_records_have_seqnos_once_the_topic_is_registered(unaware: MemoryBroker, start: str) -> None:
    log = TopicWriter(unaware, T)
    log.plain("a", "b")
    unaware.roll(T)
    log.plain("c")
    with CommittedReader(unaware, T, start=start) as reader:
        assert drain(reader) == [(None, value) for value in "abc" if start == "beginning"]
        owner, log = owned(unaware)
        log.plain("d")
        assert drain(reader) == [(None, "d")]  # nothing has shown yet that it is
        log.records(1, "e")
        log.records(2, "never")
        log.abort(2)
        log.commit(1)
        log.plain("f")
        assert drain(reader) == [(5, "e"), (6, "f")]
        unaware.roll(T)
        log.plain("g")
        owner.pump()
        owner.snapshot(T)
        assert drain(reader) == [(7, "g")]


def test_reader_that_fails_after_it_began_anew_from_a_snapshot_reads_on(
    unaware: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had read is in its new log, too, so it must not be applied a second time."""
    log = TopicWriter(unaware, T)
    log.plain("a")
    counting, failures = followers.RecordFollower.count_visible, iter([ServiceUnavailable("the cluster is away")])

    def count_visible(*arguments: Any, **options: Any) -> int:
        for failure in failures:
            raise failure
        return counting(*arguments, **options)

    monkeypatch.setattr(followers.RecordFollower, "count_visible", count_visible)
    with CommittedReader(unaware, T) as reader:
        assert drain(reader) == [(None, "a")]
        owner, log = owned(unaware)
        log.records(1, "b")
        log.commit(1)
        log.plain("c")
        owner.pump()
        owner.snapshot(T)
        with pytest.raises(ServiceUnavailable):
            drain(reader)
        assert drain(reader) == [(2, "b"), (3, "c")]


def test_transactions_of_an_unregistered_topic_are_an_error(broker: MemoryBroker) -> None:
    log = TopicWriter(broker, T)
    log.plain("a")
    with CommittedReader(broker, T) as reader:
        assert drain(reader) == [(1, "a")]
        log.records(1, "b")
        log.commit(1)
        for _ in range(2):
            with pytest.raises(SnapshotMissing):
                drain(reader)


def test_unreadable_snapshot_stops_a_reader_that_needs_it(broker: MemoryBroker) -> None:
    log = TopicWriter(broker, T)
    with CommittedReader(broker, T) as reader:
        owned(broker)
        with broker.writer(SNAPSHOT_TOPIC, exclusive=True) as writer:
            torn = Message(b"orders-end", b"torn", {"tb.v": "1", "tb.kind": "end", "tb.epoch": "9"})
            writer.append(Batch.of([torn])).result()
        log.records(1, "b")
        log.commit(1)
        for _ in range(2):
            with pytest.raises(Exception, match="orders-end"):
                drain(reader)


def failing(broker: MemoryBroker, method: str, topic: str, *, times: int) -> Interfering:
    """A broker whose cluster is away the first times that it is asked for something of a topic."""
    between = Interfering(broker)
    left = [times]

    def before(name: str, called: str) -> None:
        if (name, called) == (method, topic) and left[0]:
            left[0] -= 1
            raise ServiceUnavailable("the topic has no owner just now")

    between.before = before
    return between


@pytest.mark.parametrize(("method", "topic"), [("reader", SNAPSHOT_TOPIC), ("read", SNAPSHOT_TOPIC)])
def test_reader_continues_after_the_seqno_could_not_be_loaded(unaware: MemoryBroker, method: str, topic: str) -> None:
    log = TopicWriter(unaware, T)
    log.plain("a", "b")
    between = Interfering(unaware)
    with CommittedReader(between, T) as reader:
        assert drain(reader) == [(None, "a"), (None, "b")]
        _, log = owned(unaware)
        log.records(1, "c")
        log.commit(1)
        between.before = failing(unaware, method, topic, times=3).before
        for _ in range(3):
            with pytest.raises(ServiceUnavailable):
                drain(reader)
        log.plain("d")
        assert drain(reader) == [(3, "c"), (4, "d")]


def test_reader_retries_if_messages_for_the_seqno_are_not_delivered(
    unaware: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a cluster may be silent while its topic moves; without seqnos the rest would be handed out."""
    monkeypatch.setattr(followers, "MAX_WAIT", 0.01)
    log = TopicWriter(unaware, T)
    log.plain("a")
    between = Interfering(unaware)
    with CommittedReader(between, T) as reader:
        _, log = owned(unaware)
        log.plain("b")
        assert drain(reader) == [(None, "a"), (None, "b")]
        log.records(1, "c")
        log.commit(1)
        unaware.create_topic("silent")
        opened = unaware.reader
        with monkeypatch.context() as silent:
            silent.setattr(
                unaware, "reader", lambda topic, *at, **how: opened("silent" if topic == T else topic, *at, **how)
            )
            with pytest.raises(ReplayStalled, match="nothing came after"):
                drain(reader)
        assert drain(reader) == [(3, "c")]


def test_reader_retries_a_restart_that_failed_after_a_trim(broker: MemoryBroker) -> None:
    owner, log = owned(broker)
    log.plain("a", "b")
    owner.pump()
    between = Interfering(broker)
    with CommittedReader(between, T) as reader:
        broker.roll(T)
        log.plain("c")
        owner.pump()
        for _ in range(2):
            owner.snapshot(T)
        assert owner.trim(T, 10**6) > 1
        between.before = failing(broker, "ledgers", T, times=7).before
        for _ in range(7):
            with pytest.raises(ServiceUnavailable):
                reader.read()
        assert drain(reader) == [(3, "c")]


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_records_before_a_future_start_time_are_not_returned(isolation: str) -> None:
    clock = SimulatedClock()
    with MemoryBroker(clock=clock) as broker:
        _, log = owned(broker)
        log.plain("old")
        later = datetime.fromtimestamp(clock.now_ms() / 1000 + 10, UTC)
        with CommittedReader(broker, T, start=later, isolation=isolation, clock=clock) as reader:
            assert reader.lag()[T].behind == 0
            log.plain("early")
            assert drain(reader) == []
            clock.sleep(9)
            log.plain("earlier", "still")
            clock.sleep(1)
            log.plain("on time")
            log.plain("after")
            found = drain(reader)
            assert [value for _, value in found] == ["on time", "after"]
            if isolation == "read_committed":
                assert [seqno for seqno, _ in found] == [5, 6]


def test_lag_of_several_topics_counts_messages_not_returned(broker: MemoryBroker) -> None:
    _, log = owned(broker)
    other = TopicWriter(broker, "other")
    log.records(1, "a", "b")
    log.commit(1)
    other.plain("x", "y", "z")
    with CommittedReader(broker, [T, "other"], isolation="read_uncommitted") as reader:
        behind = {T: 3, "other": 3}
        assert {topic: lag.behind for topic, lag in reader.lag().items()} == behind
        while (batch := reader.read(limit=1)) is not None:
            behind[batch.topic] -= 1
            if batch.topic == T and behind[T] == 1:
                behind[T] = 0  # nothing but the marker is left
            assert {topic: lag.behind for topic, lag in reader.lag().items()} == behind
        assert behind == {T: 0, "other": 0}


def test_reader_that_starts_at_the_end_has_no_lag(broker: MemoryBroker) -> None:
    TopicWriter(broker, T).plain("a", "b")
    for isolation in ("read_committed", "read_uncommitted"):
        with CommittedReader(broker, T, start="end", isolation=isolation) as reader:
            assert reader.lag()[T].behind == 0


def test_duplicate_record_sets_are_returned_once(broker: MemoryBroker) -> None:
    _, log = owned(broker)
    rows = [Message(None, str(n).encode()) for n in range(1, 6)]
    with broker.writer(T) as writer:
        for size in (3, 5):
            writer.append(Batch.of([pack(Batch.of(rows[:size]), TxnId(0, 1), 1)])).result()
    log._written[1] = 5
    log.commit(1)
    with CommittedReader(broker, T) as reader:
        assert drain(reader) == [(n, str(n)) for n in range(1, 6)]


def counted_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loads: list[str] = []
    load = followers.load

    def counting(broker: Broker, topic: str) -> object:
        loads.append(topic)
        return load(broker, topic)

    monkeypatch.setattr(followers, "load", counting)
    return loads


def aborts_in_two_ledgers(broker: MemoryBroker) -> tuple[LogOwner, TopicWriter, CommittedReader]:
    """Four aborts in ledger 1, four in ledger 2 behind a transaction that stays open; a reader that has read all."""
    owner, log = owned(broker)
    reader = CommittedReader(broker, T)
    abort_some(log, 1, 2, 3, 4)
    broker.roll(T)
    log.plain("a")
    log.records(100, "b")
    abort_some(log, 5, 6, 7, 8)
    assert drain(reader) == [(1, "a")]
    broker.roll(T)
    return owner, log, reader


def test_buffered_records_are_filtered_by_aborts_in_trimmed_ledgers(broker: MemoryBroker) -> None:
    owner, log, reader = aborts_in_two_ledgers(broker)
    with reader:
        log.commit(100)
        log.plain("c")
        owner.pump()
        for _ in range(2):
            owner.snapshot(T)
        assert owner.trim(T, 10**6) == broker.ledgers(T)[-1].ledger
        owner.snapshot(T)
        assert drain(reader) == [(2, "b"), (3, "c")]


def test_reader_drops_aborts_in_trimmed_ledgers(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, log, reader = aborts_in_two_ledgers(broker)
    loads = counted_loads(monkeypatch)
    with reader:
        log.commit(100)
        assert drain(reader) == [(2, "b")]
        for value in "cd":
            broker.roll(T)
            log.plain(value)
            assert [found for _, found in drain(reader)] == [value]
        assert loads == []  # nothing is gone, so there is nothing to be had
        (followed,) = reader._followers
        assert isinstance(followed, followers.CommittedFollower)
        assert len(followed._log.buffer.aborted) == 8
        owner.pump()
        for _ in range(2):
            owner.snapshot(T)
        owner.trim(T, broker.ledgers(T)[2].ledger)
        log.plain("e")
        assert drain(reader) == [(5, "e")]
        assert loads == [T]
        # The newest part is of ledger 2 and not sealed: the owner keeps it for now, and so does a reader.
        assert followed._log.buffer.aborted.ids() == owner.buffer(T).aborted.ids()
        assert len(followed._log.buffer.aborted) < 8


def test_snapshot_that_was_not_found_at_first_is_used_once_transactions_appear(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot topic whose readers are silent looks empty; the snapshot knows what the log no longer has."""
    owner, log = owned(broker)
    log.records(1, "kept")
    log.commit(1)
    owner.pump()
    broker.roll(T)
    log.records(1, "late")  # after its end: the snapshot hides it
    log.plain("plain")
    owner.pump()
    owner.snapshot(T)
    broker.trim(T, broker.ledgers(T)[-1].ledger)
    reader_of = broker.reader

    def silent(topic: str, *arguments: object, **options: object) -> object:
        made = reader_of(topic, *arguments, **options)  # type: ignore[arg-type]  # as they come
        return SimpleNamespace(read=lambda **_: None, close=made.close) if topic == SNAPSHOT_TOPIC else made

    with monkeypatch.context() as patch:
        patch.setattr(broker, "reader", silent)
        reader = CommittedReader(broker, T)
    with reader:
        log.plain("next")
        assert [value for _, value in drain(reader)] == ["plain", "next"]
