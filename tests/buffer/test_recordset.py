"""Record sets packed, unpacked, and filtered by the visibility rule."""

from __future__ import annotations

import base64
import random

import pytest
from golden_files import committed
from histories import marker, place, record
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Message
from broker_io.block import parse_header
from broker_io.position import Position
from txnbuffer import recordset
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.errors import UndecodableRecordSet
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import RECORDS, SEQ, TXN, VERSION, encode_marker
from txnbuffer.recordset import (
    MOST_BYTES,
    SET_ROOM,
    BatchSlice,
    batch_slices,
    expand,
    pack,
    pack_all,
    rows_within,
    set_rows,
    unpack,
)

X, Y = TxnId(0, 1), TxnId(0, 2)
THREE = [Message(b"a", b"1", {"colour": "red"}), Message(b"b", None), Message(None, b"3", {}, 77)]

messages = st.builds(
    Message,
    st.none() | st.binary(max_size=5),
    st.none() | st.binary(max_size=5),
    st.dictionaries(st.sampled_from(["p", "q"]), st.sampled_from(["1", "x"]), max_size=2),
    st.integers(0, 3),
)


@given(st.lists(messages, min_size=1, max_size=10), st.booleans())
def test_records_come_back_as_they_were(rows: list[Message], compress: bool) -> None:
    packed = pack(Batch.of(rows), compress=compress)
    assert packed.key is None
    assert packed.properties == {VERSION: "1", RECORDS: str(len(rows))}
    assert [*unpack(Position(1, 0), packed)] == rows


def test_golden_record_set() -> None:
    packed = pack(Batch.of(THREE), X, 5)
    assert packed.properties == {VERSION: "1", RECORDS: "3", TXN: "0:1", SEQ: "5"}
    assert packed.value is not None
    stored = packed._replace(value=committed("record-set.block", packed.value))
    rows = [*unpack(Position(1, 0), stored)]
    assert [row.properties[SEQ] for row in rows] == ["5", "6", "7"]
    assert {row.properties[TXN] for row in rows} == {"0:1"}
    assert [(row.key, row.value, row.event_time) for row in rows] == [
        (b"a", b"1", 0),
        (b"b", None, 0),
        (None, b"3", 77),
    ]


def test_expand_replaces_sets_by_their_records_and_leaves_the_rest() -> None:
    batch = place(
        [record(X, 1), pack(Batch.of(THREE), X, 2), record(None), pack(Batch.of(THREE[:1]))],
        [Position(4, entry) for entry in range(4)],
    )
    assert set_rows(batch).tolist() == [1, 3]
    expanded = expand(batch)
    places = ["4:0", "4:1:0", "4:1:1", "4:1:2", "4:2", "4:3:0"]
    assert [str(position) for position in expanded.positions] == places
    assert [row.properties.get(SEQ) for row in expanded.messages] == ["1", "2", "3", "4", None, None]
    assert [row.key for row in expanded.messages] == [b"k", b"a", b"b", None, b"k", b"a"]
    plain = place([record(X, 1)], [Position(4, 0)])
    assert expand(plain) is plain


def test_what_is_no_sound_set_stays_as_it_is() -> None:
    odd = [
        Message(None, b"", {VERSION: "1", RECORDS: "x"}),
        encode_marker(marker())._replace(properties={VERSION: "1", "tb.marker": "1", RECORDS: "2"}),
    ]
    batch = place(odd, [Position(4, 0), Position(4, 1)])
    assert expand(batch) is batch
    member = place([pack(Batch.of(THREE))], [Position(4, 0, 0)])
    assert expand(member) is member


@pytest.mark.parametrize(
    "broken",
    [
        pack(Batch.of(THREE))._replace(value=None),
        pack(Batch.of(THREE))._replace(value=b"junk"),
        pack(Batch.of(THREE))._replace(properties={VERSION: "1", RECORDS: "4"}),
        pack(Batch.of(THREE))._replace(value=(pack(Batch.of(THREE)).value or b"") + b"\0"),
    ],
    ids=["no value", "junk", "another count", "bytes behind"],
)
def test_a_broken_set_is_one_error_that_names_the_position(broken: Message) -> None:
    with pytest.raises(UndecodableRecordSet, match="4:7"):
        expand(place([broken], [Position(4, 7)]))


def test_a_partly_repeated_set_shows_its_new_records_only() -> None:
    five = Batch.of([Message(b"k", bytes([number])) for number in range(5)])
    log = place(
        [pack(five.take(slice(0, 3)), X, 1), pack(five, X, 1), encode_marker(marker((X, Outcome.COMMIT, 5)))],
        [Position(1, entry) for entry in range(3)],
    )
    buffer = TransactionBuffer()
    buffer.apply_batch(log)
    assert buffer.counters.duplicates == 3
    assert buffer.counters.damaged == 0
    assert visible_counts(log, buffer).tolist() == [3, 2, 0]
    records = expand(log.take(visible_counts(log, buffer) > 0))
    shown = records.take(visible_counts(records, buffer) > 0)
    assert [row.value for row in shown.messages] == [bytes([number]) for number in range(5)]
    assert [str(position) for position in shown.positions] == ["1:0:0", "1:0:1", "1:0:2", "1:1:3", "1:1:4"]


def test_an_aborted_set_and_one_with_an_unreadable_transaction_stay_hidden_when_expanded() -> None:
    unreadable = pack(Batch.of(THREE))
    unreadable = unreadable._replace(properties={**unreadable.properties, TXN: "junk", SEQ: "1"})
    log = place(
        [pack(Batch.of(THREE), X), unreadable, pack(Batch.of(THREE)), encode_marker(marker((X, Outcome.ABORT, 0)))],
        [Position(1, entry) for entry in range(4)],
    )
    buffer = TransactionBuffer()
    buffer.apply_batch(log)
    assert (visible_counts(log, buffer) > 0).tolist() == [False, False, True, False]
    expanded = expand(log)
    assert (visible_counts(expanded, buffer) > 0).tolist() == [False] * 6 + [True] * 3 + [False]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(messages, min_size=1, max_size=4)), min_size=1, max_size=4),
    st.booleans(),
)
def test_packed_batches_come_back_in_order_and_stay_small(
    rows: list[tuple[int, list[Message]]], transactional: bool
) -> None:
    most_bytes = SET_ROOM + 150
    txns = [TxnId(0, least) if transactional else None for least, _ in rows]
    stretches = [BatchSlice(txn, 7, len(group)) for txn, (_, group) in zip(txns, rows, strict=True)]
    records = Batch.of([message for _, group in rows for message in group])
    sets = [*pack_all(records, stretches, most_bytes)]
    found = [(message, row) for message in sets for row in unpack(Position(1, 0), message)]
    wanted = [message for _, group in rows for message in group]
    assert [
        (row.key, row.value, {name: row.properties[name] for name in row.properties if name in "pq"}, row.event_time)
        for _, row in found
    ] == [(row.key, row.value, dict(row.properties), row.event_time) for row in wanted]
    if transactional:
        assert [(row.properties[TXN], row.properties[SEQ]) for _, row in found] == [
            (str(txn), str(seq)) for txn, (_, group) in zip(txns, rows, strict=True) for seq in range(7, 7 + len(group))
        ]
    for message in sets:
        assert message.properties[RECORDS] == "1" or len(message.value or b"") <= most_bytes


def test_a_set_has_nothing_of_the_sets_next_to_it() -> None:
    most_bytes = SET_ROOM + 1500
    chance = random.Random(1)
    texts = [base64.b85encode(chance.randbytes(320)).decode() for _ in range(8)]
    rows = [Message(None, b"x", {"p": text, f"q{number}": "1"}) for number, text in enumerate(texts)]
    for message in pack_all(Batch.of(rows), [BatchSlice(None, 1, 8)], most_bytes):
        names = {name for row in unpack(Position(1, 0), message) for name in row.properties}
        assert len(names) == 1 + int(message.properties[RECORDS])
        assert len(message.value or b"") <= most_bytes


@given(st.lists(st.none() | st.integers(1, 6), max_size=8), st.integers(1, 20))
def test_rows_within_a_limit_of_records(sizes: list[int | None], limit: int) -> None:
    rows = [record(None) if size is None else pack(Batch.of(THREE[:1] * size)) for size in sizes]
    batch = place(rows, [Position(1, entry) for entry in range(len(rows))])
    count = rows_within(batch, limit)
    totals = [sum(size or 1 for size in sizes[:end]) for end in range(len(sizes) + 1)]
    fitting = [end for end in range(len(sizes) + 1) if totals[end] <= limit]
    assert count == min(max(*fitting, 0, 1), len(sizes))


@given(st.lists(st.none() | st.integers(0, 3000), max_size=8), st.integers(1, 4), st.booleans())
def test_rows_are_unpacked_together_until_they_have_many_bytes(
    sizes: list[int | None], limit: int, compress: bool
) -> None:
    """However few bytes the sets themselves have."""
    rows = [
        record(None) if size is None else pack(Batch.of([Message(None, bytes(size))]), compress=compress)
        for size in sizes
    ]
    batch = place(rows, [Position(1, entry) for entry in range(len(rows))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordset, "TOGETHER_BYTES", 4096)
        found = [*batch_slices(batch, limit)]
    assert [position for piece in found for position in piece.positions] == [*batch.positions]
    raw = [0 if size is None else bytes_unpacked(row) for size, row in zip(sizes, rows, strict=True)]
    for piece in found:
        start = piece.positions.first.entry
        fitting = [
            end for end in range(start + 1, len(rows) + 1) if sum(raw[start:end]) <= 4096 and end - start <= limit
        ]
        assert len(piece) == max(fitting, default=start + 1) - start


def bytes_unpacked(message: Message) -> int:
    header = parse_header(message.value or b"")
    return header.keys_raw + header.values_raw


def test_sets_with_properties_of_their_own_are_unpacked_fewer_together() -> None:
    """Together each property is a column as long as all of them."""
    sets = [pack(Batch.of([Message(None, b"v", {f"{number}-{at}": "x"}) for at in range(50)])) for number in range(70)]
    batch = place(sets, [Position(1, entry) for entry in range(len(sets))])
    assert rows_within(batch, 10_000) == 70
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordset, "TOGETHER_CELLS", 1_000_000)
        count = rows_within(batch, 10_000)
    assert 500_000 < (50 * count) ** 2 <= 1_000_000


def test_a_set_with_an_invalid_header_is_an_error_when_it_is_unpacked() -> None:
    broken = pack(Batch.of(THREE))._replace(value=b"junk")
    batch = place([broken, pack(Batch.of(THREE))], [Position(4, 7), Position(4, 8)])
    assert rows_within(batch, 10) == 2


def test_a_set_that_would_fill_the_memory_is_refused() -> None:
    bomb = pack(Batch.of([Message(None, bytes(MOST_BYTES + 1))]), compress=True)
    with pytest.raises(UndecodableRecordSet, match="exceed"):
        unpack(Position(1, 0), bomb)
