"""Frames of change streams as messages of `streams.proto`

The messages have the fields of the values in `txnbuffer.streams.messages`. Frames of a peer are checked: decoding
raises MalformedFrame for contradictions, and UnsupportedFormat for blocks of a newer release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from broker_io.block import encode_block
from broker_io.position import Int64s, Positions
from broker_io.rpc.encoding import (
    BlockSlice,
    StreamMethod,
    decode_block,
    fields,
    join_blocks,
    parse,
    reader,
    serialize,
    split_blocks,
)
from txnbuffer.errors import Error, MalformedFrame
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.rpc import streams_pb2
from txnbuffer.rpc.session_encoding import decode_error, encode_error
from txnbuffer.streams.failover import MAX_SEQNO, MAX_VERSIONS, FailoverLog, Version, is_sound
from txnbuffer.streams.messages import (
    ClientMessage,
    CloseStream,
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

_ALL_FLAGS, _ALL_REQUEST_FLAGS = sum(SnapshotFlag), sum(RequestFlag)
_MAX_SPAN = 2**32 - 1
"""The largest difference of two entry numbers in a block."""

N = TypeVar("N", bound=tuple[int, ...])


def encode_stream_client_frame(messages: Iterable[ClientMessage]) -> bytes:
    """Return the bytes of messages, which keep their order."""
    frame = streams_pb2.StreamClientFrame()
    for message in messages:
        frame.messages.add(**{_NAMES[type(message)]: fields(message)})
    return serialize(frame)


def decode_stream_client_frame(data: bytes) -> tuple[ClientMessage, ...]:
    """Return the messages of these bytes. Raises MalformedFrame."""
    try:
        frame = parse(streams_pb2.StreamClientFrame, data)
        return tuple([_CLIENT[kind](getattr(row, kind)) for row in frame.messages for kind in [_kind(row)]])
    except ValueError as error:
        raise MalformedFrame(f"cannot read a frame of the client: {error}; use a client of this release") from None


def _kind(row: streams_pb2.StreamClientMessage | streams_pb2.StreamServerMessage) -> str:
    kind: str | None = row.WhichOneof("message")
    if kind is None:
        raise ValueError("a message of a frame is empty")
    return kind


def _numbers(what: str, kind: type[N]) -> Callable[[Any], N]:
    """Return what reads a message that has only numbers, from 0 on."""
    read = reader(kind)

    def checked(row: Any) -> N:
        message = read(row)
        if min(message) < 0:
            raise ValueError(f"{what} has a number below 0: {tuple(message)}")
        return message

    return checked


def _seqnos(what: str, *numbers: int) -> None:
    """Raises ValueError if a number is not a seqno."""
    if not 0 <= min(numbers) <= max(numbers) <= MAX_SEQNO:
        raise ValueError(f"{what} has a number that is not a seqno")


_read_request, _read_begin, _version = reader(StreamRequest), reader(SnapshotBegin), _numbers("a version", Version)


def _request(row: streams_pb2.StreamRequest) -> StreamRequest:
    if len(row.versions) > MAX_VERSIONS or not all(map(is_sound, map(_version, row.versions))):
        raise ValueError(f"a stream request has {len(row.versions)} versions, which no failover log can have")
    if row.stream < 1 or not 0 <= row.flags <= _ALL_REQUEST_FLAGS:
        raise ValueError(f"a stream request has the number {row.stream} and flags {row.flags}")
    _seqnos("a stream request", row.start, row.end, row.snapshot_start, row.snapshot_end, row.purge_seqno)
    return _read_request(row)


_CLIENT: dict[str, Callable[[Any], ClientMessage]] = {
    "hello": reader(StreamHello),
    "request": _request,
    "close": _numbers("a close", CloseStream),
    "grant": _numbers("a grant", Grant),
    "noop_answer": reader(NoopAnswer),
}
_NAMES: dict[type, str] = {
    StreamHello: "hello",
    StreamRequest: "request",
    CloseStream: "close",
    Grant: "grant",
    NoopAnswer: "noop_answer",
    RollbackRequired: "rollback",
    SnapshotBegin: "begin",
    SnapshotEnd: "snapshot_end",
    StreamEnd: "stream_end",
    Noop: "noop",
}
"""The fields of a row for messages whose fields have the same names there."""


# --- from server to client ---


def encode_stream_server_frame(messages: Iterable[ServerMessage]) -> bytes:
    """Return the bytes of messages, which keep their order. A batch of mutations must not be empty."""
    frame = streams_pb2.StreamServerFrame()
    add = frame.messages.add
    streams: dict[int, list[MutationBatch]] = {}
    for message in messages:
        match message:
            case StreamMutations(stream, mutations):
                add(mutations=streams_pb2.StreamMutations(stream=stream, count=len(mutations)))
                streams.setdefault(stream, []).append(mutations)
            case Ok():
                row = message._asdict()
                add(ok={"versions": fields(row.pop("log").versions), **row})
            case Refused(stream, error):
                add(refused={"stream": stream, "error": encode_error(error)})
            case Goodbye(error):
                add(goodbye=encode_error(error))
            case _:
                add(**{_NAMES[type(message)]: fields(message)})
    if not streams:
        return serialize(frame)
    blocks = [(stream, part) for stream, parts in streams.items() for part in _within_span(MutationBatch.concat(parts))]
    frame.block_streams.extend([stream for stream, _ in blocks])
    positions = [batch.positions for _, batch in blocks]
    frame.ledgers = _column([place.ledgers for place in positions])
    frame.entries = _column([place.entries for place in positions])
    frame.indexes = _column([place.indexes for place in positions])
    return join_blocks(frame, [_chunks(batch) for _, batch in blocks])


def _within_span(batch: MutationBatch) -> Iterator[MutationBatch]:
    """Cut a batch where its seqnos are too far apart for one block."""
    while batch.last - batch.first >= _MAX_SPAN:
        cut = int(np.searchsorted(batch.seqnos, batch.first + _MAX_SPAN))
        yield batch.take(slice(0, cut))
        batch = batch.take(slice(cut, None))
    yield batch


def _chunks(batch: MutationBatch) -> list[bytes]:
    times = batch.publish_times
    same = bool((times == times[0]).all())
    block = encode_block(
        batch.messages,
        first_entry=batch.first,
        publish_time=int(times[0]),
        entries=batch.seqnos,
        publish_times=None if same else times,
    )
    return block.chunks


def _column(parts: list[Int64s]) -> bytes:
    column = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return (column[:1] if (column == column[0]).all() else column).astype("<i8", copy=False).tobytes()


def decode_stream_server_frame(data: bytes) -> tuple[ServerMessage, ...]:
    """Return the messages of these bytes. Raises MalformedFrame; UnsupportedFormat for blocks of a newer release."""
    try:
        frame, blocks = split_blocks(streams_pb2.StreamServerFrame, data)
        mutations = _mutations(frame, blocks)
        done = dict.fromkeys(mutations, 0)
        messages: list[ServerMessage] = []
        for row in frame.messages:
            kind = _kind(row)
            if kind == "mutations":
                messages.append(_next_mutations(row.mutations.stream, row.mutations.count, mutations, done))
            else:
                messages.append(_SERVER[kind](getattr(row, kind)))
        if any(done[stream] != len(batch) for stream, batch in mutations.items()):
            raise ValueError("it has mutations that no message announces")
        return tuple(messages)
    except ValueError as error:
        raise MalformedFrame(f"cannot read a frame of the service: {error}; use a client of its release") from None


def _mutations(frame: streams_pb2.StreamServerFrame, blocks: list[BlockSlice]) -> dict[int, MutationBatch]:
    """Return the mutations of each stream."""
    if len(frame.block_streams) != len(blocks):
        raise ValueError(f"it has {len(blocks)} blocks for {len(frame.block_streams)} streams")
    decoded = [
        (stream, decode_block(block, f"block {number}, of stream {stream}"))
        for number, (stream, block) in enumerate(zip(frame.block_streams, blocks, strict=True))
    ]
    total = sum(len(block.messages) for _, block in decoded)
    where = Positions(
        _read_column(frame.ledgers, total, "ledgers"),
        _read_column(frame.entries, total, "entries"),
        _read_column(frame.indexes, total, "indexes"),
    )
    streams: dict[int, list[MutationBatch]] = {}
    done = 0
    for stream, (entries, times, messages) in decoded:
        here = slice(done, done + len(messages))
        streams.setdefault(stream, []).append(MutationBatch(entries, where.take(here), times, messages))
        done += len(messages)
    return {stream: MutationBatch.concat(parts) for stream, parts in streams.items()}


def _next_mutations(
    stream: int, count: int, mutations: dict[int, MutationBatch], done: dict[int, int]
) -> StreamMutations:
    start = done.get(stream, 0)
    if stream not in mutations or not 0 < count <= len(mutations[stream]) - start:
        raise ValueError(f"stream {stream} has other mutations than its messages announce")
    done[stream] = start + count
    batch = mutations[stream]
    return StreamMutations(stream, batch if count == len(batch) else batch.take(slice(start, start + count)))


def _ok(row: streams_pb2.StreamOk) -> Ok:
    numbers = row.start, row.snapshot_start, row.snapshot_end, row.end, row.high_seqno, row.purge_seqno
    _seqnos("an ok", *numbers)
    if not row.snapshot_start <= row.start <= row.snapshot_end:
        raise ValueError(f"an ok starts at {row.start}, outside [{row.snapshot_start}, {row.snapshot_end}]")
    return Ok(row.stream, FailoverLog(tuple(map(_version, row.versions))), *numbers, row.cluster, row.incarnation)


def _begin(row: streams_pb2.SnapshotBegin) -> SnapshotBegin:
    if min(row.stream, row.start) < 0 or not row.start <= row.end or not 0 <= row.flags <= _ALL_FLAGS:
        raise ValueError(f"stream {row.stream} has a snapshot [{row.start}, {row.end}] with flags {row.flags}")
    return _read_begin(row)


def _read_column(column: bytes, count: int, name: str) -> Int64s:
    if len(column) == 8 and count:
        return np.full(count, int.from_bytes(column, "little", signed=True), np.int64)
    if len(column) != 8 * count:
        raise ValueError(f"{count} mutations have {len(column)} bytes of {name}")
    return np.frombuffer(column, "<i8").astype(np.int64, copy=False)


_SERVER: dict[str, Callable[[Any], ServerMessage]] = {
    "ok": _ok,
    "rollback": _numbers("a rollback", RollbackRequired),
    "refused": reader(Refused, {Error: decode_error}),
    "begin": _begin,
    "snapshot_end": _numbers("the end of a snapshot", SnapshotEnd),
    "stream_end": reader(StreamEnd),
    "noop": reader(Noop),
    "goodbye": lambda row: Goodbye(decode_error(row)),
}


STREAMS_SERVICE = "txnbuffer.v1.Streams"
STREAMS_METHOD = "Stream"
STREAMS = StreamMethod(f"/{STREAMS_SERVICE}/{STREAMS_METHOD}", encode_stream_client_frame, decode_stream_server_frame)
