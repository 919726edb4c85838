import io

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.format import BadRecord, RecordCodec, schema

EVERYTHING = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "flag", "type": "boolean"},
        {"name": "text", "type": "string"},
        {"name": "blob", "type": "bytes"},
        {"name": "digest", "type": {"type": "fixed", "name": "Digest", "size": 4}},
        {"name": "same", "type": "Digest"},
        {"name": "column", "type": {"type": "array", "items": "long"}},
        {"name": "blobs", "type": {"type": "array", "items": "bytes"}},
    ],
}
CODEC = RecordCodec(EVERYTHING)
AVRO = fastavro.parse_schema(EVERYTHING)

values = st.fixed_dictionaries(
    {
        "number": st.integers(-(2**63), 2**63 - 1),
        "flag": st.booleans(),
        "text": st.text(max_size=20),
        "blob": st.binary(max_size=20),
        "digest": st.binary(min_size=4, max_size=4),
        "same": st.binary(min_size=4, max_size=4),
        "column": st.lists(st.integers(0, 2**40), max_size=10),
        "blobs": st.lists(st.binary(max_size=5), max_size=5),
    }
)


def plain(record):
    return {**record, "column": np.diff(record["column"], prepend=0).astype(int).tolist()}


def ours(record):
    return {**record, "column": np.array(record["column"], np.int64)}


@given(values)
def test_a_record_is_written_as_avro_does(record):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, AVRO, plain(record))
    assert CODEC.encode(ours(record)) == out.getvalue()


@given(values)
def test_a_record_reads_back_here_and_by_avro(record):
    data = CODEC.encode(ours(record))
    back = CODEC.decode(data)
    assert {**back, "column": back["column"].tolist()} == record
    assert fastavro.schemaless_reader(io.BytesIO(data), AVRO, None) == plain(record)


@given(values, st.data())
def test_a_torn_or_longer_record_is_refused(record, data):
    encoded = CODEC.encode(ours(record))
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for wrong in (encoded[:cut], encoded + b"\0"):
        with pytest.raises(BadRecord, match="Everything"):
            CODEC.decode(wrong)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_refused(data):
    try:
        record = CODEC.decode(data)
    except BadRecord:
        return
    assert set(record) == {field["name"] for field in EVERYTHING["fields"]}


def test_a_fixed_of_another_size_is_not_written():
    with pytest.raises(ValueError, match="must have 4 bytes, got 5"):
        CODEC.encode({**dict.fromkeys(("number",), 1), "flag": True, "text": "", "blob": b"", "digest": b"12345"})


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("owner-1", "snapshots"),
        ("end-1", "snapshots"),
        ("part-1", "txnbuffer.recovery"),
        ("state-1", "txnbuffer.recovery"),
    ],
)
def test_the_schemas_are_avro(name, package):
    parsed = fastavro.parse_schema(dict(schema(name, package)))
    assert all(field.get("doc") for field in parsed["fields"])
