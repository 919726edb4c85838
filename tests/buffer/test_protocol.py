"""Markers as bytes, and records as writers encode them."""

from __future__ import annotations

import fastavro
import pytest
from golden_files import committed
from histories import marker
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Message
from broker_io.block import encode_block
from txnbuffer import avro
from txnbuffer.model import MAX_LEAST, Marker, MarkerItem, Outcome, TxnId
from txnbuffer.protocol import (
    MARKER,
    MARKER_SCHEMA,
    SEQ,
    TXN,
    VERSION,
    decode_marker,
    encode_marker,
    marker_batch,
    transactional,
)

GOLDEN = {
    "border": Marker(3, 9, 0, True, ()),
    "group": marker(
        (TxnId(0, 70), Outcome.COMMIT, 3),
        (TxnId(0, 12), Outcome.ABORT, 0),
        (TxnId(0, MAX_LEAST), Outcome.COMMIT, 2**40),
        epoch=7,
        lwm=11,
    ),
    "one-phase": marker((TxnId(2**63 - 1, 1), Outcome.ABORT, 0), epoch=2, decided=False, coordinator=2**63 - 1),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_markers(name: str) -> None:
    message = encode_marker(GOLDEN[name])
    alone, made = marker_batch(GOLDEN[name]), Batch.of([message])
    assert [*alone] == [message]
    assert encode_block(alone, first_entry=0, publish_time=0) == encode_block(made, first_entry=0, publish_time=0)
    assert message.key is None
    assert message.properties == {"tb.v": "1", "tb.marker": "1"}
    assert message.value is not None
    stored = committed(f"marker-{name}.avro", message.value)
    assert decode_marker(stored) == GOLDEN[name]
    assert encode_marker(decode_marker(stored)).value == stored


def test_golden_marker_that_is_neither_decided_nor_one_phase_is_refused() -> None:
    value = encode_marker(GOLDEN["group"]).value
    assert value is not None
    assert value[:4] == b"\x00\x0e\x16\x01"
    stored = committed("marker-refused-boolean.avro", value[:3] + b"\2" + value[4:])
    with pytest.raises(ValueError, match="2 is not a boolean, which is 0 or 1"):
        decode_marker(stored)


def test_golden_marker_with_a_number_of_more_than_64_bits_is_refused() -> None:
    value = encode_marker(GOLDEN["one-phase"]).value
    assert value is not None
    assert value[8:10] == b"\xff\x01"
    stored = committed("marker-refused-number.avro", value[:9] + b"\x03" + value[10:])
    with pytest.raises(ValueError, match="a number has more than 64 bits"):
        decode_marker(stored)
    for added in (b"\xff" * 9 + b"\2", b"\x80" * 10 + b"\0"):
        with pytest.raises(ValueError, match="a number has more than 64 bits"):
            decode_marker(added + value)


longs = st.integers(0, 2**63 - 1)


@st.composite
def markers(draw: st.DrawFn) -> Marker:
    most = draw(st.one_of(st.just(0), longs))
    items = draw(st.lists(st.tuples(st.integers(1, MAX_LEAST), st.sampled_from(Outcome), longs), max_size=5))
    columns = (draw(longs), draw(longs), draw(st.booleans()))
    return Marker(most, *columns, tuple(MarkerItem(TxnId(most, least), *rest) for least, *rest in items))


@given(markers())
def test_a_marker_comes_back_as_it_was(made: Marker) -> None:
    assert decode_marker(encode_marker(made).value) == made


@given(st.binary(max_size=60))
def test_noise_is_refused_or_is_a_marker(noise: bytes) -> None:
    try:
        made = decode_marker(noise)
    except ValueError:
        return
    assert decode_marker(encode_marker(made).value) == made


@given(markers(), st.data())
def test_a_cut_marker_is_refused(made: Marker, data: st.DataObject) -> None:
    payload = encode_marker(made).value
    assert payload is not None
    with pytest.raises(ValueError):
        decode_marker(payload[: data.draw(st.integers(0, len(payload) - 1))])
    with pytest.raises(ValueError, match="follow the Avro record"):
        decode_marker(payload + b"\0")


SOUND = {
    "coordinator": 0,
    "epoch": 1,
    "low_water_mark": 0,
    "decided": True,
    "least": [5],
    "outcomes": b"\1",
    "records": [1],
}


@pytest.mark.parametrize(
    "change",
    [
        {"coordinator": -1},
        {"epoch": -1},
        {"low_water_mark": -1},
        {"least": [0]},
        {"least": [-5]},
        {"least": [MAX_LEAST, 1], "outcomes": b"\1\1", "records": [1, 1]},
        {"least": []},
        {"outcomes": b""},
        {"outcomes": b"\2"},
        {"records": [-1]},
        {"records": [1, 1]},
    ],
    ids=str,
)
def test_impossible_markers_are_refused(change: dict[str, object]) -> None:
    schema = avro.schema(MARKER_SCHEMA)
    assert decode_marker(avro.encode(schema, SOUND)).items == (MarkerItem(TxnId(0, 5), Outcome.COMMIT, 1),)
    with pytest.raises(ValueError):
        decode_marker(avro.encode(schema, SOUND | change))


def test_a_marker_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="no value"):
        decode_marker(None)


def test_the_schema_is_avro_that_any_library_reads() -> None:
    assert fastavro.parse_schema(MARKER_SCHEMA)["name"] == "txnbuffer.Marker"


def test_transactional_adds_the_properties_and_keeps_the_rest() -> None:
    plain = Batch.of([Message(b"a", b"1", {"colour": "red"}), Message(b"b", None)])
    assert [*transactional(plain, TxnId(2, 30), 4)] == [
        Message(b"a", b"1", {"colour": "red", VERSION: "1", TXN: "2:30", SEQ: "4"}),
        Message(b"b", None, {VERSION: "1", TXN: "2:30", SEQ: "5"}),
    ]
    assert MARKER not in transactional(plain, TxnId(2, 30), 4).properties
