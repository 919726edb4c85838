import io
import itertools

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.format import (
    BadRecord,
    constant_shortened,
    decode_column,
    decode_long,
    decode_longs,
    encode_column,
    encode_long,
    encode_longs,
    expanded,
)

LONG = fastavro.parse_schema({"type": "long"})
LONGS = fastavro.parse_schema({"type": "array", "items": "long"})

longs = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-70, 70),
    st.sampled_from([2**k + d for k in range(62) for d in (-1, 0, 1)] + [-(2**63), 2**63 - 1]),
)
columns = st.one_of(
    st.lists(longs, max_size=40), st.lists(st.integers(0, 60), max_size=40), st.lists(st.just(7), max_size=5)
).map(lambda values: np.array(values, np.int64))


def differences(column):
    numbers = column.tolist()
    steps = [(b - a + 2**63) % 2**64 - 2**63 for a, b in itertools.pairwise(numbers)]
    return numbers[:1] + steps


def by_fastavro(schema, value):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, value)
    return out.getvalue()


@given(longs)
def test_a_long_is_written_as_avro_does(value):
    data = encode_long(value)
    assert data == by_fastavro(LONG, value)
    assert decode_long(b"x" + data + b"y", 1) == (value, 1 + len(data))


@given(columns)
def test_a_column_is_written_as_avro_does(column):
    assert encode_column(column) == by_fastavro(LONGS, differences(column))


@given(columns)
def test_avro_reads_a_column(column):
    assert fastavro.schemaless_reader(io.BytesIO(encode_column(column)), LONGS, None) == differences(column)


@given(columns, st.binary(max_size=20), st.binary(max_size=20))
def test_a_column_reads_back(column, before, behind):
    data = encode_column(column)
    back, offset = decode_column(before + data + behind, len(before))
    assert back.tolist() == column.tolist()
    assert offset == len(before) + len(data)


@given(st.lists(columns.filter(len), min_size=1, max_size=4), st.booleans())
def test_every_block_form_of_avro_is_read(blocks, sized):
    data = b""
    for block in blocks:
        items = encode_longs(block)
        data += encode_long(-len(block)) + encode_long(len(items)) if sized else encode_long(len(block))
        data += items
    back, offset = decode_column(data + b"\0", 0)
    assert differences(back) == [int(value) for block in blocks for value in block]
    assert offset == len(data) + 1


@given(columns, st.integers(0, 400))
def test_a_torn_column_is_refused(column, cut):
    data = encode_column(column)
    if cut < len(data):
        with pytest.raises(BadRecord):
            decode_column(data[:cut], 0)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_column_or_refused(data):
    try:
        column, offset = decode_column(data, 0)
    except BadRecord:
        return
    assert 0 < offset <= len(data)
    assert len(column) <= offset


@pytest.mark.parametrize("data", [b"\xff" * 9 + b"\x02", b"\x80" * 10 + b"\x01", b"\xff" * 20, b"", b"\x80"])
def test_more_than_64_bits_are_refused(data):
    with pytest.raises(BadRecord):
        decode_long(data, 0)
    with pytest.raises(BadRecord):
        decode_longs(data, 0, 1)


def test_a_count_beyond_the_data_is_refused_before_anything_is_made():
    with pytest.raises(BadRecord):
        decode_column(encode_long(2**62) + b"\1\2\3", 0)


@given(columns)
def test_one_element_stands_for_all(column):
    short = constant_shortened(column)
    assert len(short) == (1 if len(set(column.tolist())) == 1 else len(column))
    assert expanded(short, len(column)).tolist() == column.tolist()


def test_a_column_of_another_length_is_refused():
    with pytest.raises(BadRecord):
        expanded(np.array([1, 2]), 3)
    with pytest.raises(BadRecord):
        expanded(np.array([1]), 0)
