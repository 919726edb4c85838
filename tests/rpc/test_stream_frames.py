"""Frames of change streams as bytes: golden ones, all sorts there and back, noise and damage refused."""

from __future__ import annotations

import contextlib
import random

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.errors import TopicNotFound
from broker_io.position import Position
from broker_io.rpc.encoding import serialize
from txnbuffer.errors import ConnectionSilent, MalformedFrame, StreamTrimmed
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.rpc import streams_pb2
from txnbuffer.rpc.streams_encoding import (
    decode_stream_client_frame,
    decode_stream_server_frame,
    encode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.streams.failover import MAX_SEQNO, MAX_UUID, FailoverLog, Version
from txnbuffer.streams.messages import (
    ClientMessage,
    CloseStream,
    EndReason,
    Goodbye,
    Grant,
    Noop,
    NoopAnswer,
    Ok,
    Refused,
    RequestFlag,
    RollbackRequired,
    ServerMessage,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotFlag,
    StreamEnd,
    StreamHello,
    StreamMutations,
    StreamRequest,
)

VERSIONS = Version(0xBEEF, 900), Version(0xCAFE, 0)


def batch(*rows: Mutation) -> MutationBatch:
    return MutationBatch.of(rows)


FIRST = batch(Mutation(7, Position(1, 2), b"k", b"one", {"colour": "red"}, 5, 1000))
MORE = batch(
    Mutation(8, Position(1, 3), b"l", None, {}, 0, 1000), Mutation(11, Position(1, 9, 3), None, b"", {}, 0, 1001)
)
CLIENT: dict[str, tuple[ClientMessage, ...]] = {
    "empty": (),
    "all": (
        StreamHello("indexer", 20.0),
        StreamRequest(1, "flights", 0, MAX_SEQNO, (), 0, 0, RequestFlag.FROM_NOW),
        Grant(1, 65_536, 8_388_608),
        StreamRequest(
            *(2, "flüge", 950, 2000, VERSIONS, 940, 960, RequestFlag.STRICT | RequestFlag.TO_NOW, "c-1", "i-7", 700)
        ),
        Grant(2, 1, 2),
        CloseStream(1),
        NoopAnswer(),
    ),
}
SERVER: dict[str, tuple[ServerMessage, ...]] = {
    "empty": (),
    "plain": (
        SnapshotBegin(1, 7, 8, SnapshotFlag.NONE),
        StreamMutations(1, FIRST),
        SnapshotEnd(1, 7, 11),
    ),
    "all": (
        Noop(),
        Ok(1, FailoverLog(VERSIONS), 950, 940, 960, MAX_SEQNO, 1200, 700, "c-1", "i-7"),
        RollbackRequired(2, 450),
        Refused(3, StreamTrimmed("topic flights is trimmed")),
        SnapshotBegin(1, 5, 11, SnapshotFlag.DISK | SnapshotFlag.REPEATS),
        StreamMutations(1, FIRST),
        SnapshotBegin(4, 8, 2**40, SnapshotFlag.NONE),
        StreamMutations(4, batch(*MORE, Mutation(2**40, Position(2, 0), b"far", b"away"))),
        StreamMutations(1, MORE),
        SnapshotEnd(1, 11, 12),
        StreamEnd(4, EndReason.TOO_SLOW),
        StreamEnd(1, EndReason.OK),
        Refused(5, TopicNotFound("no topic")),
        Goodbye(ConnectionSilent("silent")),
    ),
}


def plain(message: ClientMessage | ServerMessage) -> object:
    """A message as a value that compares."""
    if isinstance(message, StreamMutations):
        return message.stream, tuple(message.mutations)
    if isinstance(message, (Refused, Goodbye)):
        return message[:-1], type(message.error), str(message.error), vars(message.error)
    return type(message), message


@pytest.mark.parametrize("name", CLIENT)
def test_golden_client_frames(name: str) -> None:
    stored = committed(f"streams/client-{name}.bin", encode_stream_client_frame(CLIENT[name]))
    assert decode_stream_client_frame(stored) == CLIENT[name]
    assert encode_stream_client_frame(decode_stream_client_frame(stored)) == stored


@pytest.mark.parametrize("name", SERVER)
def test_golden_server_frames(name: str) -> None:
    stored = committed(f"streams/server-{name}.bin", encode_stream_server_frame(SERVER[name]))
    assert [*map(plain, decode_stream_server_frame(stored))] == [*map(plain, SERVER[name])]
    assert encode_stream_server_frame(decode_stream_server_frame(stored)) == stored


seqnos = st.integers(0, MAX_SEQNO)
streams = st.integers(1, 2**40)
words = st.text("abc-_é/", max_size=5)
versions = st.lists(st.builds(Version, st.integers(1, MAX_UUID), seqnos), max_size=25).map(tuple)
client_messages = st.one_of(
    st.builds(StreamHello, words, st.floats(0, 1e6)),
    st.builds(
        StreamRequest, streams, words, seqnos, seqnos, versions, seqnos, seqnos,
        st.integers(0, 31).map(RequestFlag), words, words, seqnos,
    ),
    st.builds(CloseStream, streams),
    st.builds(Grant, streams, seqnos, seqnos),
    st.builds(NoopAnswer),
)  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> MutationBatch:
    count = draw(st.integers(1, 4))
    rows = [
        Mutation(
            seqno, Position(draw(seqnos), draw(seqnos), draw(st.integers(-1, 9))),
            draw(st.none() | st.binary(max_size=3)), draw(st.none() | st.binary(max_size=5)),
            draw(st.dictionaries(words, words, max_size=2)),
            draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40)),
        )
        for seqno in sorted(draw(st.sets(seqnos, min_size=count, max_size=count)))
    ]  # fmt: skip
    return MutationBatch.of(rows)


@st.composite
def oks(draw: st.DrawFn) -> Ok:
    low, start, high = sorted(draw(st.lists(seqnos, min_size=3, max_size=3)))
    log = FailoverLog.initial(draw(st.integers(1, MAX_UUID)))
    return Ok(draw(streams), log, start, low, high, *draw(st.tuples(seqnos, seqnos, seqnos, words, words)))


@st.composite
def begins(draw: st.DrawFn) -> SnapshotBegin:
    start, end = sorted(draw(st.lists(seqnos, min_size=2, max_size=2)))
    return SnapshotBegin(draw(streams), start, end, SnapshotFlag(draw(st.integers(0, 3))))


errors = st.one_of(st.builds(StreamTrimmed, words), st.builds(ConnectionSilent, words))
server_messages = st.one_of(
    oks(),
    st.builds(RollbackRequired, streams, seqnos),
    st.builds(Refused, streams, errors),
    begins(),
    st.builds(SnapshotEnd, streams, seqnos, seqnos),
    st.builds(StreamEnd, streams, st.sampled_from(EndReason)),
    st.builds(Noop),
    st.builds(Goodbye, errors),
)


@given(st.lists(client_messages, max_size=6).map(tuple))
def test_a_client_frame_comes_back_as_it_was(messages: tuple[ClientMessage, ...]) -> None:
    assert decode_stream_client_frame(encode_stream_client_frame(messages)) == messages


@given(st.lists(server_messages, max_size=6), st.lists(batches(), max_size=3), st.randoms(use_true_random=False))
def test_a_server_frame_comes_back_as_it_was(
    messages: list[ServerMessage], mutations: list[MutationBatch], order: random.Random
) -> None:
    frame = [*messages, *(StreamMutations(stream, one) for stream, one in enumerate(mutations, 1))]
    order.shuffle(frame)
    assert [*map(plain, decode_stream_server_frame(encode_stream_server_frame(frame)))] == [*map(plain, frame)]


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_cut_frame_is_refused_or_has_fewer_messages(side: str) -> None:
    """gRPC delivers whole messages only; a frame that is cut between two messages is a frame."""
    messages, payload, decode = (
        (CLIENT["all"], encode_stream_client_frame(CLIENT["all"]), decode_stream_client_frame)
        if side == "client"
        else (SERVER["all"], encode_stream_server_frame(SERVER["all"]), decode_stream_server_frame)
    )
    for size in range(len(payload)):
        with contextlib.suppress(MalformedFrame):
            found = decode(payload[:size])
            assert [*map(plain, found)] == [*map(plain, messages[: len(found)])]
    with pytest.raises(MalformedFrame):
        decode(payload + b"\0")


@given(st.data())
def test_a_flipped_bit_is_refused_or_is_a_frame(data: st.DataObject) -> None:
    payload = bytearray(encode_stream_server_frame(SERVER["all"]))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_stream_server_frame(bytes(payload))
    except MalformedFrame:
        return


@given(st.binary(max_size=80))
def test_noise_raises_no_other_error(noise: bytes) -> None:
    for decode in (decode_stream_client_frame, decode_stream_server_frame):
        with contextlib.suppress(MalformedFrame):
            decode(noise)


def test_an_unknown_field_is_refused() -> None:
    for decode in (decode_stream_client_frame, decode_stream_server_frame):
        with pytest.raises(MalformedFrame, match="a field that this release does not know"):
            decode(b"\xf8\x01\x01")


REQUEST: dict[str, object] = {"stream": 1, "topic": "a", "end": 1}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, "a message of a frame is empty"),
        ({"close": {"stream": -1}}, "below 0"),
        ({"grant": {"stream": 1, "items": -1}}, "below 0"),
        ({"request": REQUEST | {"stream": 0}}, "the number 0"),
        ({"request": REQUEST | {"flags": 32}}, "flags 32"),
        ({"request": REQUEST | {"flags": -1}}, "flags -1"),
        ({"request": REQUEST | {"end": -1}}, "not a seqno"),
        ({"request": REQUEST | {"versions": [{"uuid": 1, "seqno": -1}]}}, "below 0"),
        ({"request": REQUEST | {"versions": [{"uuid": 0, "seqno": 1}]}}, "no failover log can have"),
        ({"request": REQUEST | {"versions": [{"uuid": 1, "seqno": 1}] * 26}}, "26 versions"),
    ],
)
def test_a_client_frame_that_contradicts_itself_is_refused(message: dict[str, object], text: str) -> None:
    frame = streams_pb2.StreamClientFrame(messages=[{"noop_answer": {}}, message])
    with pytest.raises(MalformedFrame, match=text):
        decode_stream_client_frame(serialize(frame))


OK: dict[str, object] = {
    "stream": 1, "versions": [{"uuid": 1, "seqno": 0}], "start": 1, "snapshot_end": 2, "end": 3, "high_seqno": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, "a message of a frame is empty"),
        ({"ok": OK | {"start": 3}}, "outside"),
        ({"ok": OK | {"versions": []}}, "0 versions"),
        ({"ok": OK | {"high_seqno": -1}}, "not a seqno"),
        ({"begin": {"stream": 1, "start": 2, "end": 1}}, "snapshot"),
        ({"begin": {"stream": 1, "start": 1, "end": 1, "flags": 4}}, "flags 4"),
        ({"rollback": {"stream": 1, "seqno": -1}}, "below 0"),
        ({"snapshot_end": {"stream": 1, "seqno": -1}}, "below 0"),
        ({"stream_end": {"stream": 1, "reason": 9}}, "EndReason"),
        ({"refused": {"stream": 1}}, "unknown fault"),
        ({"mutations": {"stream": 1, "count": 1}}, "other mutations"),
    ],
)
def test_a_server_frame_that_contradicts_itself_is_refused(message: dict[str, object], text: str) -> None:
    frame = streams_pb2.StreamServerFrame(messages=[{"noop": {}}, message])
    with pytest.raises(MalformedFrame, match=text):
        decode_stream_server_frame(serialize(frame))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"block_streams": [1]}, "0 blocks for 1 streams"),
        ({"block_streams": [1], "blocks": [b"?"]}, "block 0, of stream 1"),
        ({"ledgers": bytes(8)}, "8 bytes of ledgers"),
    ],
)
def test_blocks_that_contradict_their_frame_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(MalformedFrame, match=text):
        decode_stream_server_frame(serialize(streams_pb2.StreamServerFrame(**fields)))


@pytest.mark.parametrize("counts", [[], [0, 2], [1], [3], [2, 1], [-1, 3]])
def test_mutations_that_are_not_announced_are_refused(counts: list[int]) -> None:
    frame = streams_pb2.StreamServerFrame.FromString(encode_stream_server_frame([StreamMutations(1, MORE)]))
    frame.ClearField("messages")
    for count in counts:
        frame.messages.add(mutations={"stream": 1, "count": count})
    with pytest.raises(MalformedFrame, match="mutations"):
        decode_stream_server_frame(serialize(frame))
