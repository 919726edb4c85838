"""Frames of change streams as bytes: golden ones, all sorts there and back, noise and damage refused."""

from __future__ import annotations

import random

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.errors import TopicNotFound
from broker_io.position import Position
from txnbuffer import avro
from txnbuffer.errors import ConnectionSilent, MalformedFrame, StreamTrimmed
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.rpc.stream_frames import (
    CLIENT_SCHEMA,
    SERVER_SCHEMA,
    decode_stream_client_frame,
    decode_stream_server_frame,
    encode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.streams.failover import MAX_SEQNO, MAX_UUID, FailoverLog, Version
from txnbuffer.streams.messages import (
    STREAM_VERSION,
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
        StreamHello(STREAM_VERSION, "indexer", 20.0),
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
    st.builds(StreamHello, streams, words, st.floats(0, 1e6)),
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
def test_a_cut_or_longer_frame_is_refused(side: str) -> None:
    payload = (
        encode_stream_client_frame(CLIENT["all"]) if side == "client" else encode_stream_server_frame(SERVER["all"])
    )
    decode = decode_stream_client_frame if side == "client" else decode_stream_server_frame
    for damaged in (*(payload[:size] for size in range(len(payload))), payload + b"\0"):
        with pytest.raises(MalformedFrame):
            decode(damaged)


@given(st.data())
def test_a_flipped_bit_is_refused_or_is_a_frame(data: st.DataObject) -> None:
    payload = bytearray(encode_stream_server_frame(SERVER["all"]))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_stream_server_frame(bytes(payload))
    except MalformedFrame:
        return


@given(st.binary(max_size=80))
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (decode_stream_client_frame, decode_stream_server_frame):
        with pytest.raises(MalformedFrame):
            decode(len(noise).to_bytes(4, "big") + noise)


def changed(schema: dict[str, object], frame: bytes, changes: dict[str, object]) -> bytes:
    """A frame without blocks, with some fields of its control record changed."""
    parsed = avro.schema(schema)
    control = avro.encode(parsed, avro.decode(parsed, frame[4:]) | changes)
    return len(control).to_bytes(4, "little") + control


REQUEST: dict[str, object] = {
    "stream": 1, "topic": "a", "start": 0, "end": 1, "uuids": [], "version_seqnos": [], "snapshot_start": 0,
    "snapshot_end": 0, "flags": 0, "cluster": "", "incarnation": "", "purge_seqno": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": b"\5"}, "5 is not a kind of message"),
        ({"kinds": b"\2"}, "fewer messages"),
        ({"close_stream": [1]}, "more messages"),
        ({"kinds": b"\3", "grant_stream": [1]}, "grants have columns"),
        ({"kinds": b"\2", "close_stream": [-1]}, "below 0"),
        ({"kinds": b"\1", "requests": [REQUEST | {"stream": 0}]}, "the number 0"),
        ({"kinds": b"\1", "requests": [REQUEST | {"flags": 32}]}, "flags 32"),
        ({"kinds": b"\1", "requests": [REQUEST | {"end": -1}]}, "not a seqno"),
        ({"kinds": b"\1", "requests": [REQUEST | {"uuids": [1]}]}, "versions have columns"),
        ({"kinds": b"\1", "requests": [REQUEST | {"uuids": [0], "version_seqnos": [1]}]}, "no failover log can have"),
        ({"kinds": b"\1", "requests": [REQUEST | {"uuids": [1] * 26, "version_seqnos": [1] * 26}]}, "26 versions"),
    ],
)
def test_a_client_frame_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedFrame, match=message):
        decode_stream_client_frame(changed(CLIENT_SCHEMA, encode_stream_client_frame(()), changes))


OK: dict[str, object] = {
    "stream": 1, "uuids": [1], "version_seqnos": [0], "start": 1, "snapshot_start": 0, "snapshot_end": 2, "end": 3,
    "high_seqno": 4, "purge_seqno": 0, "cluster": "", "incarnation": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": b"\0", "ok": [OK | {"start": 3}]}, "outside"),
        ({"kinds": b"\0", "ok": [OK | {"uuids": [], "version_seqnos": []}]}, "0 versions"),
        ({"kinds": b"\0", "ok": [OK | {"high_seqno": -1}]}, "not a seqno"),
        ({"kinds": b"\3", "begin_stream": [1], "begin_start": [2], "begin_end": [1], "begin_flags": b"\0"}, "snapshot"),
        ({"kinds": b"\3", "begin_stream": [1], "begin_start": [1], "begin_end": [1], "begin_flags": b"\4"}, "flags 4"),
        ({"kinds": b"\4", "mutations_stream": [1], "mutations_count": [1]}, "other mutations"),
        ({"kinds": b"\6", "stream_end_stream": [1], "stream_end_reason": b"\11"}, "EndReason"),
        ({"refused_stream": [1]}, "refusals have columns"),
        ({"block_stream": [1]}, "block 0, of stream 1"),
        ({"ledgers": bytes(8)}, "8 bytes of ledgers"),
    ],
)
def test_a_server_frame_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedFrame, match=message):
        decode_stream_server_frame(changed(SERVER_SCHEMA, encode_stream_server_frame(()), changes))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_mutations_that_are_not_announced_are_refused(count: int) -> None:
    frame = encode_stream_server_frame([StreamMutations(1, MORE)])
    control = int.from_bytes(frame[:4], "little")
    with pytest.raises(MalformedFrame, match="mutations"):
        head = changed(SERVER_SCHEMA, frame[: 4 + control], {"mutations_count": [count]})
        decode_stream_server_frame(head + frame[4 + control :])
