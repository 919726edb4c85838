"""Fields that a release does not know are refused at any depth: it cannot do what they ask for."""

from __future__ import annotations

import pytest
from frame_rows import field

from broker_io.errors import MalformedMessage
from broker_io.remote.messages import decode_ask, decode_open_reader, decode_open_writer
from broker_io.rpc import log_pb2
from broker_io.rpc.encoding import parse
from txnbuffer.errors import MalformedFrame
from txnbuffer.model import TxnId
from txnbuffer.rpc import session_pb2, streams_pb2
from txnbuffer.rpc.session_encoding import decode_client_frame
from txnbuffer.rpc.streams_encoding import decode_stream_client_frame

UNKNOWN = b"\xf8\x07\x01"
"""Field 127, the number 1."""
REFUSED = "has a field that this release does not know"
COMMIT = session_pb2.Commit(request=1, most=0, least=1).SerializeToString()
REQUEST = streams_pb2.StreamRequest(stream=1, topic="a", end=1, flags=2).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [
        UNKNOWN,
        field(1, UNKNOWN),
        field(1, field(2, UNKNOWN)),
        field(8, session_pb2.Begin(request=1, least=1).SerializeToString() + UNKNOWN),
        field(10, COMMIT + UNKNOWN),
        field(10, COMMIT + field(7, UNKNOWN)),
        field(10, COMMIT + field(7, field(1, UNKNOWN))),
    ],
    ids=["frame", "hello", "txn of a hello", "begin", "commit", "details", "sequence of details"],
)
def test_unknown_fields_of_sessions_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrame, match=f"a ClientFrame {REFUSED}"):
        decode_client_frame(data)


@pytest.mark.parametrize(
    "message",
    [field(1, b"") + UNKNOWN, field(1, UNKNOWN), field(2, REQUEST + UNKNOWN), field(2, REQUEST + field(5, UNKNOWN))],
    ids=["message", "hello", "request", "version of a request"],
)
def test_unknown_fields_of_streams_are_refused(message: bytes) -> None:
    with pytest.raises(MalformedFrame, match=f"a StreamClientFrame {REFUSED}"):
        decode_stream_client_frame(field(1, message))


def test_unknown_fields_of_the_log_service_are_refused() -> None:
    writer = log_pb2.OpenLogWriter(topic="a").SerializeToString()
    reader = log_pb2.OpenLogReader(topic="a", start={"ledger": 1}).SerializeToString()
    for decode, data in (
        (decode_open_writer, field(1, writer + UNKNOWN)),
        (decode_open_reader, field(1, reader + UNKNOWN)),
        (decode_open_reader, field(1, reader + field(3, UNKNOWN))),
        (decode_ask, UNKNOWN),
    ):
        with pytest.raises(MalformedMessage, match=REFUSED):
            decode(data)


def test_other_encodings_of_known_fields_are_read() -> None:
    """Fields in another order, defaults that are written out, numbers that are not packed."""
    written_out = COMMIT + b"\x10\x00" + field(4, b"t") + b"\x28\x03" + b"\x30\x00"
    frame = decode_client_frame(b"\x70\x00" + field(10, written_out) + field(8, b"\x18\x05\x08\x02"))
    assert [(one.txn, one.topics, one.records) for one in frame.commits] == [(TxnId(0, 1), ("t",), (3,))]
    assert [one.txn for one in frame.begins] == [TxnId(0, 5)]


def test_an_unknown_field_is_refused_where_another_one_is_shorter_than_usual() -> None:
    """Three numbers that are not packed save the three bytes that the unknown field has."""
    rows = [COMMIT + field(4, b"t") + b"\x28\x03" for _ in range(3)]
    data = b"".join(field(10, row) for row in rows)
    with pytest.raises(ValueError, match=REFUSED):
        parse(session_pb2.ClientFrame, data + UNKNOWN)
