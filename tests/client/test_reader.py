"""The committed reader: what it returns, where it starts, and what it rejects."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from snapshots.errors import SnapshotMissing
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.records import Record
from txnbuffer.client.reading.starts import Seqno
from txnbuffer.errors import InvalidRequest, ProtocolStopped, UndecodableRecordSet
from txnbuffer.model import EARLIEST, Position, TxnId
from txnbuffer.recordset import pack

TOPIC = "orders"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with MemoryBroker() as broker:
        yield broker


@pytest.fixture
def manager(broker: Broker) -> Iterator[LogOwner]:
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register(TOPIC)
        yield manager


@pytest.fixture
def log(broker: Broker, manager: LogOwner) -> TopicWriter:
    return TopicWriter(broker, TOPIC)


def drain(reader: CommittedReader) -> list[Record]:
    records: list[Record] = []
    while (batch := reader.read()) is not None:
        records += batch
    return records


def values(records: list[Record]) -> list[str]:
    return ["-" if record.value is None else record.value.decode() for record in records]


def read(broker: Broker, **options: object) -> list[Record]:
    with CommittedReader(broker, TOPIC, **options) as reader:  # type: ignore[arg-type]  # passed on as they come
        return drain(reader)


def test_returns_committed_and_ordinary_records_in_log_order(broker: Broker, log: TopicWriter) -> None:
    log.plain("p1")
    log.records(1, "a1")
    log.records(2, "b1")
    log.records(1, "a2", None, key="k")
    log.abort(2)
    log.commit(1)
    log.plain("p2")
    records = read(broker)
    assert values(records) == ["p1", "a1", "a2", "-", "p2"]
    assert [record.seqno for record in records] == [1, 2, 3, 4, 5]
    assert [record.txn for record in records] == [None, TxnId(0, 1), TxnId(0, 1), TxnId(0, 1), None]
    assert records[3].key == b"k"
    assert all(not name.startswith("tb.") for record in records for name in record.properties)


def test_stops_before_the_oldest_open_transaction_until_it_ends(broker: Broker, log: TopicWriter) -> None:
    with CommittedReader(broker, TOPIC) as reader:
        log.plain("p1")
        log.records(1, "a1")
        log.plain("p2")
        assert values(drain(reader)) == ["p1"]
        lag = reader.lag()[TOPIC]
        assert (lag.behind, lag.undecided) == (2, 2)
        log.commit(1)
        assert values(drain(reader)) == ["a1", "p2"]
        assert reader.lag()[TOPIC].behind == 0


@pytest.mark.parametrize("snapshot", [False, True])
def test_reads_from_any_position_with_the_same_seqnos(
    broker: Broker, log: TopicWriter, manager: LogOwner, snapshot: bool
) -> None:
    for txn in range(1, 30):
        log.records(txn, f"{txn}a", f"{txn}b")
        log.records(txn, f"{txn}b", first_seq=2)
        (log.abort if txn % 3 == 0 else log.commit)(txn)
        if txn % 7 == 0:
            broker.roll(TOPIC)
    manager.pump()
    if snapshot:
        manager.snapshot(TOPIC)
    log.records(30, "30a")
    log.commit(30)
    whole = read(broker)
    assert [record.seqno for record in whole] == [*range(1, len(whole) + 1)]
    for n, record in enumerate(whole):
        assert read(broker, start=record.position) == whole[n:]
        behind = Position(record.position.ledger, record.position.entry + 1)
        assert read(broker, start=behind) == whole[n + 1 :]


def test_starts_at_the_end(broker: Broker, log: TopicWriter) -> None:
    log.plain("old")
    with CommittedReader(broker, TOPIC, start="end") as reader:
        log.plain("new")
        assert [(record.seqno, record.value) for record in drain(reader)] == [(2, b"new")]


def test_start_at_the_end_is_after_an_open_transaction(broker: Broker, log: TopicWriter) -> None:
    log.records(1, "before")
    with CommittedReader(broker, TOPIC, start="end") as reader:
        log.records(1, "after")
        log.commit(1)
        assert values(drain(reader)) == ["after"]


def test_starts_at_a_time(broker: Broker, log: TopicWriter) -> None:
    log.plain("old")
    future = datetime(2100, 1, 1, tzinfo=UTC)
    past = datetime(2000, 1, 1, tzinfo=UTC)
    assert values(read(broker, start=past)) == ["old"]
    assert read(broker, start=future) == []
    assert values(read(broker, start=datetime.min.replace(tzinfo=UTC))) == ["old"]


def test_starts_differ_by_topic(broker: Broker, log: TopicWriter, manager: LogOwner) -> None:
    manager.register("other")
    other = TopicWriter(broker, "other")
    log.plain("x")
    other.plain("y1")
    at = other.plain("y2").first
    with CommittedReader(broker, [TOPIC, "other"], start={"other": at}) as reader:
        assert sorted(values(drain(reader))) == ["x", "y2"]


def test_read_uncommitted_returns_every_record(broker: Broker, log: TopicWriter) -> None:
    log.records(1, "a")
    log.abort(1)
    log.records(2, "b")
    records = read(broker, isolation="read_uncommitted")
    assert values(records) == ["a", "b"]
    assert records[0].seqno is None


def test_lag_of_read_uncommitted_counts_records_not_returned(broker: Broker, log: TopicWriter) -> None:
    log.plain("a", "b", "c")
    with CommittedReader(broker, TOPIC, isolation="read_uncommitted") as reader:
        batch = reader.read(limit=1)
        assert batch is not None
        assert values(list(batch)) == ["a"]
        assert reader.lag()[TOPIC].behind == 2


def test_batch_has_at_most_limit_records(broker: Broker, log: TopicWriter) -> None:
    log.plain(*map(str, range(25)))
    with CommittedReader(broker, TOPIC) as reader:
        sizes = []
        while (batch := reader.read(limit=10)) is not None:
            sizes.append(len(batch))
        assert sizes == [10, 10, 5]


def test_read_returns_none_after_the_timeout(broker: Broker, log: TopicWriter) -> None:
    with CommittedReader(broker, TOPIC) as reader:
        assert reader.read(timeout=0.05) is None


def test_topic_without_transactions_is_numbered_from_its_start(broker: Broker, manager: LogOwner) -> None:
    broker.create_topic("plain")
    with broker.writer("plain") as writer:
        writer.append(Batch.of([Message(value=b"1"), Message(value=b"2")])).result(120)
    with CommittedReader(broker, "plain") as reader:
        assert [(record.seqno, record.value) for record in drain(reader)] == [(1, b"1"), (2, b"2")]


def test_continues_while_the_owner_trims(broker: Broker, log: TopicWriter, manager: LogOwner) -> None:
    for txn in range(1, 5):
        log.records(txn, str(txn))
        (log.commit if txn % 2 else log.abort)(txn)
        broker.roll(TOPIC)
    manager.pump()
    manager.snapshot(TOPIC)
    manager.pump()
    manager.snapshot(TOPIC)
    first = broker.ledgers(TOPIC)[2].ledger
    manager.trim(TOPIC, first)
    assert broker.ledgers(TOPIC)[0].ledger == first
    assert [(record.seqno, record.value) for record in read(broker)] == [(2, b"3")]
    with pytest.raises(PositionTrimmed):
        CommittedReader(broker, TOPIC, start=Position(first - 1, 0))


HIGHEST = 2**63 - 1


@pytest.mark.parametrize(
    "start", [Position(HIGHEST, HIGHEST), Position(HIGHEST, HIGHEST, HIGHEST), Position(HIGHEST, 0), Seqno(HIGHEST)]
)
def test_largest_numbers_of_a_start_are_behind_every_record(
    broker: Broker, log: TopicWriter, start: Position | Seqno
) -> None:
    log.plain("1")
    with CommittedReader(broker, TOPIC, start=start) as reader:
        log.plain("2")
        assert drain(reader) == []


@pytest.mark.parametrize(
    "start",
    [
        (HIGHEST + 1, 0),
        (0, HIGHEST + 1),
        (0, 0, HIGHEST + 1),
        (-2, 0),
        (-2, -2),
        (-1, 0),
        (-1, -1, 0),
        (0, -2),
        (0, 0, -2),
        ("1", 2),
        (1.5, 2),
    ],
)
def test_start_that_no_log_can_have_is_refused(broker: Broker, log: TopicWriter, start: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=f"start can't be '{Position(*start)}': no ledger or entry"):
        CommittedReader(broker, TOPIC, start=Position(*start))


def test_trimmed_next_record_is_an_error(broker: Broker, log: TopicWriter, manager: LogOwner) -> None:
    log.plain("1")
    with CommittedReader(broker, TOPIC) as reader:
        assert values(drain(reader)) == ["1"]
        broker.roll(TOPIC)
        log.plain("2")
        broker.roll(TOPIC)
        log.plain("3")
        broker.trim(TOPIC, broker.ledgers(TOPIC)[-1].ledger)
        with pytest.raises(PositionTrimmed):
            drain(reader)


def test_an_undecodable_marker_stops_the_topic_and_names_the_position(broker: Broker, log: TopicWriter) -> None:
    log.plain("fine")
    with broker.writer(TOPIC) as writer:
        bad = writer.append(Batch.of([Message(value=b"?", properties={"tb.v": "1", "tb.marker": "1"})])).result(120)
    log.plain("never")
    with CommittedReader(broker, TOPIC) as reader:
        shown: list[Record] = []
        with pytest.raises(ProtocolStopped, match=f"topic {TOPIC} stopped at {bad.first}"):
            while (batch := reader.read()) is not None:
                shown += batch
        assert values(shown) in ([], ["fine"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topics": "nowhere"}, TopicNotFound),
        ({"topics": []}, InvalidRequest),
        ({"topics": TOPIC, "isolation": "serializable"}, InvalidRequest),
        ({"topics": TOPIC, "start": "middle"}, InvalidRequest),
        ({"topics": TOPIC, "start": {"typo": "end"}}, InvalidRequest),
    ],
)
def test_invalid_arguments_are_rejected(
    broker: Broker, log: TopicWriter, arguments: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        CommittedReader(broker, **arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_invalid_limit_is_rejected(broker: Broker, log: TopicWriter) -> None:
    with CommittedReader(broker, TOPIC, start=EARLIEST) as reader, pytest.raises(InvalidRequest):
        reader.read(limit=0)


def put(broker: Broker, *messages: Message) -> Position:
    with broker.writer(TOPIC) as writer:
        return writer.append(Batch.of(list(messages))).result(120).first


def test_undecodable_record_set_stops_the_topic(broker: Broker, log: TopicWriter) -> None:
    log.plain("p")
    bad = put(broker, Message(value=b"good1"), Message(value=b"junk", properties={"tb.v": "1", "tb.records": "3"}))
    log.plain("never")
    for isolation in ("read_committed", "read_uncommitted"):
        with CommittedReader(broker, TOPIC, isolation=isolation) as reader:
            shown: list[Record] = []
            for _ in range(2):
                with pytest.raises(UndecodableRecordSet, match=f"{bad.ledger}:{bad.entry + 1} "):
                    while (batch := reader.read()) is not None:
                        shown += batch
                log.plain("later")
            assert values(shown) == ["p", "good1"]


def test_decided_records_before_a_stop_are_returned_and_the_error_is_repeated(broker: Broker, log: TopicWriter) -> None:
    with CommittedReader(broker, TOPIC) as reader:
        put(broker, Message(value=b"good"), Message(value=b"x", properties={"tb.v": "2", "tb.txn": "0:1"}))
        assert values(list(reader.read() or ())) == ["good"]
        for _ in range(2):
            with pytest.raises(ProtocolStopped):
                reader.read()


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_record_sets_respect_limit_and_start(broker: Broker, log: TopicWriter, isolation: str) -> None:
    at = put(broker, pack(Batch.of([Message(value=str(n).encode()) for n in range(20)])))
    with CommittedReader(broker, TOPIC, start=at._replace(batch=5), isolation=isolation) as reader:
        batches = []
        while (batch := reader.read(limit=4)) is not None:
            batches.append(list(batch))
    assert [len(batch) for batch in batches] == [4, 4, 4, 3]
    assert values([record for batch in batches for record in batch]) == [str(n) for n in range(5, 20)]
    if isolation == "read_committed":
        assert [record.seqno for batch in batches for record in batch] == [*range(6, 21)]


def test_dead_letters_in_a_topic_without_transactions_are_ordinary_records(broker: Broker, manager: LogOwner) -> None:
    """Their producers copy all properties, and add some; a reader also sees them once the topic has transactions."""
    broker.create_topic("dead")
    writer = broker.writer("dead")
    for name in ("ORIGIN_MESSAGE_ID", "REAL_TOPIC"):
        for seq in (1, 2, 2):
            copied = {"tb.v": "1", "tb.txn": "0:9", "tb.seq": str(seq), name: "x"}
            writer.append(Batch.of([Message(value=b"%d" % seq, properties=copied), Message(value=b"own")])).result(60)
    found = ["1", "own", "2", "own", "2", "own"] * 2
    with CommittedReader(broker, "dead") as reader:
        assert values(drain(reader)) == found
        manager.register("dead")
        own = TopicWriter(broker, "dead")
        own.records(1, "new")
        own.commit(1)
        assert values(drain(reader)) == ["new"]
    with CommittedReader(broker, "dead") as reader:
        assert values(drain(reader)) == [*found, "new"]


def test_transactions_without_a_snapshot_are_an_error(broker: Broker, log: TopicWriter, manager: LogOwner) -> None:
    log.records(1, "x")
    log.commit(1)
    manager.close()
    broker.delete_topic(SNAPSHOT_TOPIC)
    with CommittedReader(broker, TOPIC) as reader, pytest.raises(SnapshotMissing, match="txnbuf recover"):
        reader.read()
    with LogOwner(broker) as owner:
        owner.recover()
        owner.rebuild(TOPIC)
    assert values(read(broker)) == ["x"]
