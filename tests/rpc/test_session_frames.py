"""Frames as bytes: golden ones, all sorts there and back, noise and damage refused."""

from __future__ import annotations

import numpy as np
import pytest
from frame_rows import client_frames, plain_client, plain_server, server_frames
from golden_files import GOLDEN, committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.errors import Error, MessageTooLarge, PeerError
from broker_io.position import Position
from txnbuffer import avro
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
from txnbuffer.rpc.client_frames import CLIENT_SCHEMA, decode_client_frame, encode_client_frame
from txnbuffer.rpc.columns import ERROR_SCHEMA, decode_error, encode_error
from txnbuffer.rpc.frames import (
    SESSION_VERSION,
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
    VersionMismatch,
    Welcome,
)
from txnbuffer.rpc.server_frames import SERVER_SCHEMA, decode_server_frame, encode_server_frame

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
        hello=SessionHello(SESSION_VERSION, "s-1", (A, B)),
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
}


@pytest.mark.parametrize("name", CLIENT)
def test_golden_client_frames(name: str) -> None:
    stored = committed(f"session/client-{name}.bin", encode_client_frame(CLIENT[name]))
    assert plain_client(decode_client_frame(stored)) == plain_client(CLIENT[name])
    assert encode_client_frame(decode_client_frame(stored)) == stored


def test_a_client_of_an_older_version_is_told_to_upgrade() -> None:
    with pytest.raises(VersionMismatch, match=r"client has version 1 .* service version 2: upgrade the client"):
        decode_client_frame((GOLDEN / "session/client-version-1.bin").read_bytes())


def test_of_a_newer_version_nothing_is_read_but_that() -> None:
    newer = b"\x02" + b"\x06" + b"whatever stands behind it then"
    with pytest.raises(VersionMismatch, match=r"client has version 3 .* service version 2: upgrade the service"):
        decode_client_frame(len(newer).to_bytes(4, "little") + newer)


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


@given(client_frames, st.data())
def test_a_cut_or_longer_client_frame_is_refused(frame: ClientFrame, data: st.DataObject) -> None:
    payload = encode_client_frame(frame)
    for damaged in (payload[: data.draw(st.integers(0, len(payload) - 1))], payload + b"\0"):
        with pytest.raises(MalformedFrame):
            decode_client_frame(damaged)


@given(server_frames, st.data())
def test_a_cut_or_longer_server_frame_is_refused(frame: ServerFrame, data: st.DataObject) -> None:
    payload = encode_server_frame(frame)
    for damaged in (payload[: data.draw(st.integers(0, len(payload) - 1))], payload + b"\0"):
        with pytest.raises(MalformedFrame):
            decode_server_frame(damaged)


@given(client_frames, st.data())
def test_a_flipped_byte_is_refused_or_is_a_frame(frame: ClientFrame, data: st.DataObject) -> None:
    payload = bytearray(encode_client_frame(frame))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_client_frame(bytes(payload))
    except MalformedFrame:
        return


@given(st.binary(max_size=80))
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (decode_client_frame, decode_server_frame):
        with pytest.raises(MalformedFrame):
            decode(len(noise).to_bytes(4, "big") + noise)


def client_control(**changes: object) -> bytes:
    """An otherwise empty client frame with some fields of its control record changed."""
    return with_changes(CLIENT_SCHEMA, encode_client_frame(ClientFrame()), changes)


def server_control(**changes: object) -> bytes:
    return with_changes(SERVER_SCHEMA, encode_server_frame(ServerFrame()), changes)


def with_changes(schema: dict[str, object], frame: bytes, changes: dict[str, object]) -> bytes:
    parsed = avro.schema(schema)
    control = avro.encode(parsed, avro.decode(parsed, frame[4:]) | changes)
    return len(control).to_bytes(4, "little") + control


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit_request": [1]}, "commits have columns"),
        ({"commit_request": [1], "commit_most": [0], "commit_least": [0], "commit_topics": [0]}, "out of range"),
        ({"commit_request": [1], "commit_most": [-1], "commit_least": [1], "commit_topics": [0]}, "out of range"),
        ({"abort_request": [1, 2, 3], "abort_most": [1, 2], "abort_least": [1, 2, 3]}, "halves"),
        ({"commit_topic_rows": [-1], "topics": ["a"], "commit_records": [1]}, "a topic that the frame does not have"),
        ({"commit_topic_rows": [0], "topics": ["a"], "commit_records": [-1]}, "below 0"),
        (
            {"commit_request": [1], "commit_most": [0], "commit_least": [1], "commit_topics": [2]}
            | {"commit_topic_rows": [0], "topics": ["a"], "commit_records": [1]},
            "1 parts instead of 2",
        ),
        ({"send_topics": [0]}, "a topic that the frame does not have"),
        ({"send_topics": [0], "topics": ["orders"]}, "block 0, for topic 'orders'"),
        ({"register_request": [1], "register_name": []}, "register requests have columns"),
        ({"returned_first": [1], "returned_size": [-1]}, "below 0"),
        (
            {"begin_request": [1], "begin_most": [0], "begin_least": [1], "begin_timeout": [float("nan")]},
            "negative or not a finite",
        ),
        ({"begin_extras": [{"row": -1, "parent": None, "naming": None}]}, "adds to begin -1 of 0"),
    ],
)
def test_a_client_frame_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedFrame, match=message):
        decode_client_frame(client_control(**changes))


ODD_ERROR = {"name": "Odd", "fault": "nobody", "message": "", "details": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome_request": [1], "outcomes": b""}, "answers of the kind 'outcome'"),
        ({"outcome_request": [1], "outcomes": b"\2"}, "2 is not a valid outcome"),
        ({"state_request": [1], "states": b"\5"}, "5 is not a valid state"),
        ({"leased_request": [1], "leased_first": [1], "leased_size": []}, "answers have columns"),
        ({"goodbye": ODD_ERROR}, "the unknown fault 'nobody'"),
        ({"failures": [{"send": 1, "txn": {"most": 0, "least": 0}, "error": ODD_ERROR}]}, "id out of range"),
    ],
)
def test_a_server_frame_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedFrame, match=message):
        decode_server_frame(server_control(**changes))


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
    fields = {"name": "Unheard", "fault": "peer", "message": "moved", "details": {"retryable": 1, "where": "b"}}
    error = decode_error(fields)
    assert type(error) is PeerError
    assert str(error) == "moved"
    assert error.retryable is False
    assert vars(error) == {"where": "b"}


def test_the_schema_of_an_error_holds_whatever_an_error_says() -> None:
    schema = avro.schema(ERROR_SCHEMA)
    error = MessageTooLarge("é" * 10)
    error.add_note("notes stay at home")
    assert str(decode_error(avro.decode(schema, avro.encode(schema, encode_error(error))))) == str(error)


def test_a_send_whose_labels_lie_is_refused() -> None:
    properties = {"tb.txn": Labels(np.array([0, 2], np.int32), ("0:1", "0:2"))}
    send = Send("stock", Batch(Blobs.none(2), Blobs.none(2), properties))
    with pytest.raises(MalformedFrame, match="has a label number without a label"):
        decode_client_frame(encode_client_frame(ClientFrame(sends=(send,))))
