"""Decoding a batch into slices, markers and undecodable records, by rows and by columns."""

from __future__ import annotations

import numpy as np
import pytest
from histories import BROKEN, BROKEN_SET, Log, cuts, histories, marker, place, record
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Labels, Message, Numbers, PlacedBatch
from broker_io.position import Position, Positions
from txnbuffer.buffer.buffer import PlacedMarker, decode, decode_columns, decode_rows
from txnbuffer.errors import ProtocolStopped, UndecodableMarker, UnsupportedProtocol
from txnbuffer.model import Outcome, RecordSlice, TxnId, Undecodable
from txnbuffer.protocol import (
    FEW_ROWS,
    MARKER,
    RECORDS,
    SEQ,
    TXN,
    VERSION,
    SentSlice,
    _slices_of_columns,
    _slices_of_rows,
    encode_marker,
    sent_slices,
)

X, Y = TxnId(0, 1), TxnId(0, 2)


def both(placed: PlacedBatch) -> list[object]:
    """The items of a batch, after checking that rows and columns decode to the same; errors as type and message."""
    rows, columns = ([_comparable(item) for item in way(placed)] for way in (decode_rows, decode_columns))
    assert rows == columns
    return rows


def _comparable(item: object) -> object:
    return (type(item), str(item)) if isinstance(item, ProtocolStopped) else item


texts = st.sampled_from(
    [
        "1",
        "2",
        "3",
        "0",
        "-1",
        "01",
        "x",
        "",
        "0:1",
        "0:2",
        "1:0",
        "9" * 19,
        "9" * 30,
        "0:" + "9" * 20,
        "1\n2",
        "0:1\n0:2",
    ]
)
noise = st.dictionaries(st.sampled_from([VERSION, TXN, SEQ, RECORDS, MARKER, "other"]), texts, max_size=5)
plausible = st.fixed_dictionaries(
    {VERSION: st.just("1"), TXN: st.sampled_from(["0:1", "0:2", "0:x"]), SEQ: st.sampled_from(["1", "2", "3"])},
    optional={RECORDS: st.sampled_from(["1", "2", "0"])},
)


def sent(*rows: tuple[str | None, str | None, str | None]) -> list[SentSlice] | None:
    """The slices of sent records, given as version, transaction and seq, read by rows and by columns."""
    properties = [dict(zip((VERSION, TXN, SEQ), row, strict=True)) for row in rows]
    found = Batch.of(Message(properties={n: t for n, t in row.items() if t is not None}) for row in properties)
    columns = [found.properties.get(name, Labels.of([None] * len(rows))) for name in (TXN, SEQ, VERSION)]
    by_rows, by_columns = _slices_of_rows(*columns), _slices_of_columns(*columns)
    assert by_rows == by_columns == sent_slices(dict(zip((TXN, SEQ, VERSION), columns, strict=True)), len(rows))
    return by_rows


near = st.sampled_from(["1", "2", "3", "4"])
sent_rows = st.tuples(st.just("1"), st.sampled_from(["0:1", "0:2", "1:7"]), near)


@given(st.lists(sent_rows | sent_rows | st.tuples(*[texts | st.none()] * 3), min_size=1, max_size=12))
def test_rows_and_columns_of_sent_records_agree(rows: list[tuple[str | None, str | None, str | None]]) -> None:
    sent(*rows)


def test_sent_records_are_sliced_by_transaction_and_number() -> None:
    rows = [("1", "0:1", "1"), ("1", "0:1", "2"), ("1", "0:2", "3"), ("1", "0:2", "5"), ("1", "0:1", "3")]
    assert sent(*rows) == [(X, 0, 2, 1), (Y, 2, 1, 3), (Y, 3, 1, 5), (X, 4, 1, 3)]
    assert (
        sent(("1", "0:1", "0"))
        is sent(("2", "0:1", "1"))
        is sent(("1", "0:0", "1"))
        is sent((None, "0:1", "1"))
        is None
    )


@given(st.lists(st.one_of(noise, plausible, st.just({})), min_size=1, max_size=12), st.booleans())
def test_rows_and_columns_agree_on_anything(properties: list[dict[str, str]], members: bool) -> None:
    count = len(properties)
    positions = [Position(1, row // 3, row % 3) if members else Position(1, row * 2, -1) for row in range(count)]
    both(place([Message(b"k", b"v", row) for row in properties], positions))


@given(histories(), cuts)
def test_every_message_is_in_exactly_one_item(history, cut) -> None:
    at = 0
    for placed in history.log.batches(0, None, cut):
        events = history.log.events[at : at + len(placed)]
        at += len(placed)
        seen: list[Position] = []
        for item in both(placed):
            if isinstance(item, PlacedMarker):
                assert [event.marker for event in events if event.position == item.position] == [item.marker]
                seen.append(item.position)
                continue
            covered = [event for event in events if event.records and item.first <= event.records[0] <= item.last]
            assert (covered[0].records[0], covered[-1].records[-1]) == (item.first, item.last)
            assert isinstance(item, Undecodable) == covered[0].bad
            if isinstance(item, RecordSlice):
                assert {event.txn for event in covered} == {item.txn}
                assert sum(len(event.records) for event in covered) == item.size
                assert covered[0].seq == item.first_seq
            seen += [event.position for event in covered]
        assert seen == [event.position for event in events]


def runs(log: Log) -> list[tuple[TxnId | None, int, int]]:
    (placed,) = log.batches()
    return [(item.txn, item.first_seq, item.size) for item in both(placed) if isinstance(item, RecordSlice)]


@pytest.mark.parametrize("more", [0, FEW_ROWS])
def test_runs_split_where_transaction_or_seq_break(more: int) -> None:
    log = Log()
    log.records(X, 1, 3)
    log.records(X, 5, 2)
    log.records(Y, 7, 1)
    log.records(None, 0, 2)
    log.records(X, 1, 1 + more)
    assert runs(log) == [(X, 1, 3), (X, 5, 2), (Y, 7, 1), (None, 0, 2), (X, 1, 1 + more)]
    (placed,) = log.batches()
    assert decode(placed) == decode_rows(placed)


def test_a_record_set_is_a_run_of_its_own() -> None:
    log = Log()
    log.record(X, 1)
    log.record(X, 2, size=5)
    log.record(X, 7, size=2)
    log.record(X, 9)
    log.record(None, 0, size=3)
    log.record(None)
    (placed,) = log.batches()
    assert runs(log) == [(X, 1, 1), (X, 2, 5), (X, 7, 2), (X, 9, 1), (None, 0, 3), (None, 0, 1)]
    assert both(placed)[1] == RecordSlice(X, Position(1, 1, 0), Position(1, 1, 4), 2, 5)


@pytest.mark.parametrize("properties", [*BROKEN, BROKEN_SET], ids=str)
def test_broken_records_are_undecodable(properties: dict[str, str]) -> None:
    placed = place([Message(b"k", b"v", properties), record(X, 1)], [Position(1, 0), Position(1, 1)])
    item, run = both(placed)
    assert isinstance(item, Undecodable)
    assert item.first.entry == item.last.entry == 0
    assert "tb." in item.reason
    assert run == RecordSlice(X, Position(1, 1), Position(1, 1), 1, 1)


def test_a_record_set_inside_a_batch_of_the_broker_is_refused() -> None:
    placed = place([record(X, 1, size=2)], [Position(1, 0, 0)])
    (item,) = both(placed)
    assert isinstance(item, Undecodable)
    assert "batch index 0" in item.reason


@pytest.mark.parametrize("version", ["2", "0", "01", "", "1.0", "9" * 50])
@pytest.mark.parametrize("rest", [{}, {TXN: "0:1", SEQ: "1"}, {MARKER: "1"}])
def test_another_protocol_version_stops_the_topic(version: str, rest: dict[str, str]) -> None:
    messages = [record(X, 1), record(X, 2), Message(None, b"", {VERSION: version, **rest}), record(X, 3)]
    run, stop = both(place(messages, [Position(1, entry) for entry in range(4)]))
    assert run == RecordSlice(X, Position(1, 0), Position(1, 1), 1, 2)
    assert stop == (UnsupportedProtocol, str(UnsupportedProtocol(Position(1, 2), repr(version[:40]))))


SOUND_MARKER = encode_marker(marker((X, Outcome.COMMIT, 1)))


@pytest.mark.parametrize(
    "message",
    [
        SOUND_MARKER._replace(value=None),
        SOUND_MARKER._replace(value=b"junk"),
        SOUND_MARKER._replace(value=b""),
        SOUND_MARKER._replace(properties={VERSION: "1", MARKER: "2"}),
        SOUND_MARKER._replace(properties={MARKER: "1"}),
    ],
    ids=["no value", "junk", "empty", "another text", "no version"],
)
def test_an_undecodable_marker_stops_the_topic(message: Message) -> None:
    run, stop = both(place([record(X, 1), message, record(X, 2)], [Position(1, entry) for entry in range(3)]))
    assert isinstance(run, RecordSlice)
    kind, text = stop
    assert kind is UndecodableMarker
    assert "stopped at 1:1" in text


def test_a_marker_is_a_marker_whatever_else_its_properties_say() -> None:
    message = SOUND_MARKER._replace(properties={**SOUND_MARKER.properties, TXN: "0:1", SEQ: "1", RECORDS: "x"})
    (item,) = both(place([message], [Position(1, 0)]))
    assert isinstance(item, PlacedMarker)


def test_columns_of_every_form_are_read_alike() -> None:
    count = 10
    rows = Batch.of([Message(b"k", b"v")] * count)
    ids = Labels(np.zeros(count, np.int32), ("0:1", *(f"0:{number}" for number in range(2, 100))))
    seqs = np.arange(1, count + 1)
    for seq in (Numbers(seqs), Labels.of(map(str, seqs))):
        for version in (Numbers(np.ones(count, np.int64)), Labels.constant("1", count)):
            batch = Batch(rows.keys, rows.values, {VERSION: version, TXN: ids, SEQ: seq})
            placed = PlacedBatch(Positions.consecutive(1, 0, count), np.zeros(count, np.int64), batch)
            assert both(placed) == [RecordSlice(X, Position(1, 0), Position(1, 9), 1, 10)]


def test_an_empty_batch_has_no_items() -> None:
    empty = place([], [])
    assert decode_rows(empty) == decode_columns(empty) == []
