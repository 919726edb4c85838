"""Frames as bytes: golden ones, all sorts there and back, noise and damage refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from frame_rows import client_frames, plain_client, plain_server, server_frames
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.errors import Error, MessageTooLarge, PeerError
from broker_io.position import Position
from broker_io.rpc import log_pb2
from broker_io.rpc.encoding import serialize
from txnbuffer.coordinator.messages import (
    Begin,
    Branch,
    Commit,
    ConsumerPosition,
    Done,
    GroupHeartbeat,
    Joined,
    Leased,
    MemberAssignments,
    NameOpened,
    PartitionAssignment,
    ProducerSequence,
    SessionOpened,
    State,
)
from txnbuffer.errors import AlreadyCommitted, MalformedFrame, OutcomeForgotten, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import transactional
from txnbuffer.rpc import session_pb2
from txnbuffer.rpc.frames import (
    Abort,
    ClientFrame,
    Deletion,
    Failure,
    IdBlock,
    LeaseRequest,
    NamedRequest,
    Query,
    Send,
    ServerFrame,
    SessionHello,
    Welcome,
)
from txnbuffer.rpc.session_encoding import (
    decode_client_frame,
    decode_error,
    decode_server_frame,
    encode_client_frame,
    encode_error,
    encode_server_frame,
)

A, B = TxnId(0, 7), TxnId(3, 9)
BATCH = Batch.of([Message(b"k", b"one", {"colour": "red"}, 5), Message(None, None)])

CLIENT = {
    "empty": ClientFrame(),
    "plain": ClientFrame(
        begins=(Begin(1, A), Begin(2, TxnId(0, 8))),
        sends=(Send("orders", transactional(BATCH, A, 1)), Send("stock", BATCH)),
        commits=(Commit(3, A, ("orders",), (2,)), Commit(4, TxnId(0, 8), ("stock", "orders"), (1, 1))),
    ),
    "full": ClientFrame(
        hello=SessionHello("s-1", (A, B)),
        registers=(NamedRequest(5, "orders"),),
        leases=(LeaseRequest(6, 100),),
        open_names=(NamedRequest(7, "sink"),),
        delete_names=(Deletion(16, "source"), Deletion(21, "job", 3)),
        joins=(NamedRequest(8, "group"),),
        members=(
            GroupHeartbeat(18, "group", "me", ("orders", "orders"), ("orders-partition-0", "orders-partition-1")),
            GroupHeartbeat(19, "group", "m", ("stock",), ("stock",), (Position(1, 9, 3),)),
            GroupHeartbeat(20, "group", "gone", leaves=True),
        ),
        begins=(Begin(9, A, 2.5), Begin(10, B, None, A, ProducerSequence("sink", 4, 2))),
        sends=(Send("orders", BATCH),),
        commits=(
            Commit(11, A, (), ()),
            Commit(
                *(12, B, ("orders",), (1,), True, ProducerSequence("sink", 4, 2)),
                *((Branch(TxnId(0, 10), ("stock",), (3,)),), (TxnId(0, 11), TxnId(1, 12))),
                (ConsumerPosition("group", "stock", 2, Position(1, 2), Position(1, 9, 3)),),
            ),
        ),
        aborts=(Abort(13, A), Abort(17, B, ("stock", "orders"))),
        queries=(Query(14, A), Query(15, B)),
        returned=(IdBlock(20, 5),),
        bye=True,
    ),
}


def worded(error: Error, message: str) -> Error:
    """The error with the message that the golden frame has."""
    error.args = (message,)
    return error


FORGOTTEN = worded(
    OutcomeForgotten(B), f"the outcome of transaction {B} is forgotten: it ended; read the topics to see how"
)
ABORTED = worded(
    TransactionAborted(A, "its time is up"),
    f"transaction {A} was aborted: its time is up; begin another one to do it again",
)
COMMITTED = worded(
    AlreadyCommitted("sink", 3, 41), "number 3 of 'sink' is committed (the last one is 41): go on behind it"
)
SERVER = {
    "empty": ServerFrame(),
    "plain": ServerFrame(acknowledged=12, answers=((1, Outcome.COMMIT), (2, Outcome.ABORT))),
    "full": ServerFrame(
        welcome=Welcome("s-1", 0, 4, 5_242_880, ((A, State.OPEN), (B, FORGOTTEN))),
        acknowledged=3,
        failures=(Failure(2, MessageTooLarge("too large")), Failure(3, ABORTED, A)),
        answers=(
            (1, Outcome.COMMIT),
            (2, State.COMMITTING),
            (3, Done()),
            (4, Leased(100, 50)),
            (5, NameOpened(2, 41)),
            (6, Joined(3, (("orders", Position(1, 2)), ("stock", Position(1, 9, 3))))),
            (7, COMMITTED),
            (
                8,
                MemberAssignments(
                    4,
                    (
                        PartitionAssignment("orders", 2, Position(1, 2)),
                        PartitionAssignment("stock", 4, Position(1, 9, 3)),
                    ),
                    unsettled=True,
                ),
            ),
        ),
        credits=1_000_000,
        draining=True,
        goodbye=PeerError("the service stops"),
    ),
    "goodbye": ServerFrame(acknowledged=7, goodbye=PeerError("the service stops"), settled=True),
}


@pytest.mark.parametrize("name", CLIENT)
def test_golden_client_frames(name: str) -> None:
    stored = committed(f"session/client-{name}.bin", encode_client_frame(CLIENT[name]))
    assert plain_client(decode_client_frame(stored)) == plain_client(CLIENT[name])
    assert encode_client_frame(decode_client_frame(stored)) == stored


@pytest.mark.parametrize("name", SERVER)
def test_golden_server_frames(name: str) -> None:
    stored = committed(f"session/server-{name}.bin", encode_server_frame(SERVER[name]))
    assert plain_server(decode_server_frame(stored)) == plain_server(SERVER[name])
    assert encode_server_frame(decode_server_frame(stored)) == stored


@given(client_frames)
def test_a_client_frame_comes_back_as_it_was(frame: ClientFrame) -> None:
    assert plain_client(decode_client_frame(encode_client_frame(frame))) == plain_client(frame)


@given(server_frames)
def test_a_server_frame_comes_back_as_it_was(frame: ServerFrame) -> None:
    assert plain_server(decode_server_frame(encode_server_frame(frame))) == plain_server(frame)


@given(st.one_of(client_frames.map(encode_client_frame), server_frames.map(encode_server_frame)), st.data())
def test_a_cut_frame_is_refused_or_has_fewer_fields(payload: bytes, data: st.DataObject) -> None:
    """gRPC delivers whole messages only; a frame that is cut between two fields is a frame."""
    cut = payload[: data.draw(st.integers(0, len(payload)))]
    for decode in (decode_client_frame, decode_server_frame):
        with contextlib.suppress(MalformedFrame):
            decode(cut)
        with pytest.raises(MalformedFrame):
            decode(payload + b"\0")


@given(client_frames, st.data())
def test_a_flipped_byte_is_refused_or_is_a_frame(frame: ClientFrame, data: st.DataObject) -> None:
    payload = bytearray(encode_client_frame(frame)) or bytearray(1)
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_client_frame(bytes(payload))
    except MalformedFrame:
        return


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 40, b"\x82\x02\x01a"])
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (decode_client_frame, decode_server_frame):
        with pytest.raises(MalformedFrame):
            decode(noise)


@given(st.binary(max_size=80))
def test_other_bytes_raise_no_other_error(noise: bytes) -> None:
    for decode in (decode_client_frame, decode_server_frame):
        with contextlib.suppress(MalformedFrame):
            decode(noise)


def named(**fields: object) -> dict[str, object]:
    return {"request": 1, "least": 1, **fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"commits": [named(least=0)]}, "0:0 is out of range"),
        ({"commits": [named(most=-1)]}, "-1:1 is out of range"),
        ({"aborts": [named(least=0)]}, "out of range"),
        ({"queries": [named(most=-1)]}, "out of range"),
        ({"hello": {"open": [{}]}}, "out of range"),
        ({"commits": [named(topics=["a"], records=[-1])]}, r"1 topics with the numbers of records \(-1,\)"),
        ({"commits": [named(topics=["a"])]}, r"1 topics with the numbers of records \(\)"),
        (
            {"commits": [named(details={"winners": [{"txn": {"least": 1}, "records": [1]}]})]},
            "0 topics with the numbers",
        ),
        ({"commits": [named(details={"losers": [{}]})]}, "out of range"),
        ({"sends": [{"topic": "orders"}]}, "1 sends and 0 blocks"),
        ({"sends": [{"topic": "orders"}], "blocks": [b""]}, "block 0, for topic 'orders'"),
        ({"returned": [{"first": 1, "size": -1}]}, "below 0"),
        ({"delete_names": [{"request": 1, "over": -1}]}, "below 0"),
        ({"begins": [named(timeout=float("nan"))]}, "negative or not a finite"),
        ({"begins": [named(timeout=-1.0)]}, "negative or not a finite"),
        ({"begins": [named(details={"parent": {}})]}, "out of range"),
        ({"members": [{"topics": ["a"]}]}, "1 topics and 0 ends for 0 partitions"),
        ({"members": [{"topics": ["a", "a"], "partitions": ["a", "b"], "ends": [{}]}]}, "1 ends for 2 partitions"),
    ],
)
def test_a_client_frame_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedFrame, match=message):
        decode_client_frame(serialize(session_pb2.ClientFrame(**fields)))


def test_a_frame_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(MalformedFrame, match="a ClientFrame has a field that this release does not know"):
        decode_client_frame(encode_client_frame(CLIENT["plain"]) + b"\xf8\x01\x01")


ODD_ERROR = {"name": "Odd", "fault": "nobody"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answers": [{"request": 1}]}, "the answer to request 1 has no result"),
        ({"answers": [{"request": 1, "state": 5}]}, "5 is not a valid State"),
        ({"answers": [{"request": 1, "joined": {"topics": ["a"]}}]}, "shorter"),
        ({"goodbye": ODD_ERROR}, "the unknown fault 'nobody'"),
        ({"failures": [{"send": 1, "txn": {}, "error": {"fault": "peer"}}]}, "id 0:0 is out of range"),
    ],
)
def test_a_server_frame_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedFrame, match=message):
        decode_server_frame(serialize(session_pb2.ServerFrame(**fields)))


def test_what_is_no_answer_of_a_session_is_not_sent() -> None:
    with pytest.raises(TypeError, match="Opened"):
        encode_server_frame(ServerFrame(answers=((1, SessionOpened(1, ())),)))


def test_a_damaged_block_is_named() -> None:
    frame = bytearray(encode_client_frame(ClientFrame(sends=(Send("orders", BATCH), Send("stock", BATCH)))))
    frame[-1] ^= 1  # padding: of no consequence
    frame[-8] ^= 1
    with pytest.raises(MalformedFrame, match="block 1, for topic 'stock'"):
        decode_client_frame(bytes(frame))


def test_an_error_comes_back_as_its_class_with_what_it_carries() -> None:
    error = decode_error(encode_error(AlreadyCommitted("sink", 3, 41)))
    assert isinstance(error, AlreadyCommitted)
    assert (error.name, error.number, error.last) == ("sink", 3, 41)
    aborted = decode_error(encode_error(TransactionAborted(A, "its time is up")))
    assert isinstance(aborted, TransactionAborted)
    assert aborted.txn == A
    assert aborted.reason == "its time is up"


def test_an_error_of_a_newer_release_is_of_its_fault() -> None:
    message = log_pb2.Error(
        name="Unheard",
        fault="peer",
        message="moved",
        details=[{"name": "retryable", "number": 1}, {"name": "where", "text": "b"}],
    )
    error = decode_error(message)
    assert type(error) is PeerError
    assert str(error) == "moved"
    assert error.retryable is False
    assert vars(error) == {"where": "b"}


def test_an_error_is_sent_without_its_notes() -> None:
    error = MessageTooLarge("é" * 10)
    error.add_note("notes stay at home")
    found = decode_error(log_pb2.Error.FromString(serialize(encode_error(error))))
    assert (str(found), vars(found)) == (str(error), {})


def test_a_send_whose_labels_lie_is_refused() -> None:
    properties = {"tb.txn": Labels(np.array([0, 2], np.int32), ("0:1", "0:2"))}
    send = Send("stock", Batch(Blobs.none(2), Blobs.none(2), properties))
    with pytest.raises(MalformedFrame, match="has a label number without a label"):
        decode_client_frame(encode_client_frame(ClientFrame(sends=(send,))))
