"""The formats of change-stream frames. A frame from client to server is a control record without blocks

    kinds            one byte per message: 0 hello, 1 stream request, 2 close stream, 3 grant, 4 noop answer
    hello            version, name, noop_interval in seconds
    requests         stream, topic, start, end; the client's versions, newest first: uuids[], version_seqnos[];
                     snapshot_start, snapshot_end; flags (`RequestFlag`); cluster, incarnation, purge_seqno
    close_stream     stream
    grant_*          stream, items, bytes: totals since the stream was opened

and one from server to client is a control record, and blocks of mutations

    kinds            one byte per message: 0 ok, 1 rollback, 2 refused, 3 snapshot begin, 4 mutations, 5 snapshot end,
                     6 stream end, 7 noop, 8 goodbye
    ok               stream; the failover log, newest first: uuids[], version_seqnos[]; start, snapshot_start,
                     snapshot_end, end, high_seqno, purge_seqno, cluster, incarnation
    rollback_*       stream, seqno
    refused_*        stream, error
    begin_*          stream, start, end; flags: one byte each (`SnapshotFlag`)
    mutations_*      stream, count: the number of the stream's mutations in this message, at least 1
    end_*            stream, seqno, high (the high seqno)
    stream_end_*     stream; reason: one byte each (`EndReason`)
    goodbye          error
    block_stream     the stream of each block after the control record. The blocks of a stream have the mutations of
                     its messages, in order. The entry numbers of a block are seqnos, its publish times are those of
                     the records
    ledgers, entries, indexes
                     the positions of the records in the topic's log: int64, little-endian, for the mutations of all
                     blocks in order; or a single number if it is the same for all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from broker_io.block import BadBlock, decode_foreign_block, encode_block
from broker_io.position import Int64s, Positions
from txnbuffer import avro
from txnbuffer.errors import MalformedFrame
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.rpc.columns import (
    ERROR_SCHEMA,
    LONGS,
    Fields,
    decode_error,
    encode_error,
    join,
    record,
    rows,
    same_length,
    split,
)
from txnbuffer.streams.failover import MAX_SEQNO, MAX_VERSIONS, FailoverLog, Version, is_sound
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

NAMESPACE = "txnbuffer.streams"

M = TypeVar("M")


def schema_of(name: str, fields: Iterable[tuple[str, Any]]) -> Fields:
    """Return the Avro schema of a record of this protocol."""
    return record(name, fields, NAMESPACE)


def columns(messages: Iterable[Iterable[Any]], *names: str) -> Fields:
    """Return the fields of messages as columns with these names."""
    rows = list(messages)
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)} if rows else {
        name: [] for name in names
    }  # fmt: skip


def rows_of(control: Fields, what: str, *names: str) -> Iterator[tuple[Any, ...]]:
    """Return the rows of these columns of numbers. Raises ValueError if the lengths differ or a number is below 0."""
    found = [control[name] for name in names]
    same_length(what, *found)
    for column in found:
        if column and min(column) < 0:
            raise ValueError(f"{what} have a number below 0")
    return zip(*found, strict=True)


def in_order(kinds: bytes, by_kind: list[Iterator[M]]) -> tuple[M, ...]:
    """Return the messages in the order of `kinds`. Raises ValueError if there are more or fewer of a kind."""
    if kinds and max(kinds) >= len(by_kind):
        raise ValueError(f"{max(kinds)} is not a kind of message")
    try:
        messages = tuple([next(by_kind[kind]) for kind in kinds])
    except StopIteration:
        raise ValueError("it has fewer messages than it announces") from None
    if any(next(rest, None) is not None for rest in by_kind):
        raise ValueError("it has more messages than it announces")
    return messages


def version_columns(versions: tuple[Version, ...]) -> Fields:
    return {"uuids": [version.uuid for version in versions], "version_seqnos": [version.seqno for version in versions]}


def versions_of(fields: Fields) -> tuple[Version, ...]:
    """Return the versions from the columns of `version_columns`. Raises ValueError."""
    return tuple(map(Version._make, rows_of(fields, "versions", "uuids", "version_seqnos")))


def seqnos(what: str, *numbers: int) -> None:
    """Raises ValueError if a number is not a seqno."""
    if not 0 <= min(numbers) <= max(numbers) <= MAX_SEQNO:
        raise ValueError(f"{what} has a number that is not a seqno")


_OK = schema_of(
    "Ok",
    [
        *(("stream", "long"), ("uuids", LONGS), ("version_seqnos", LONGS)),
        *((name, "long") for name in ("start", "snapshot_start", "snapshot_end", "end", "high_seqno", "purge_seqno")),
        *(("cluster", "string"), ("incarnation", "string")),
    ],
)
SERVER_SCHEMA = schema_of(
    "ServerFrame",
    [
        *(("kinds", "bytes"), ("ok", rows(_OK)), ("rollback_stream", LONGS), ("rollback_seqno", LONGS)),
        *(("refused_stream", LONGS), ("refused_error", rows(ERROR_SCHEMA))),
        *(("begin_stream", LONGS), ("begin_start", LONGS), ("begin_end", LONGS), ("begin_flags", "bytes")),
        *(("mutations_stream", LONGS), ("mutations_count", LONGS)),
        *(("end_stream", LONGS), ("end_seqno", LONGS), ("end_high", LONGS)),
        *(("stream_end_stream", LONGS), ("stream_end_reason", "bytes")),
        ("goodbye", rows("txnbuffer.streams.Error")),
        *(("block_stream", LONGS), ("ledgers", "bytes"), ("entries", "bytes"), ("indexes", "bytes")),
    ],
)

_SCHEMA = avro.schema(SERVER_SCHEMA)
_KINDS: tuple[type[ServerMessage], ...] = (
    *(Ok, RollbackRequired, Refused, SnapshotBegin, StreamMutations, SnapshotEnd, StreamEnd, Noop, Goodbye),
)
_ALL_FLAGS = sum(SnapshotFlag)
_MAX_SPAN = 2**32 - 1
"""The largest difference of two entry numbers in a block."""


def encode_stream_server_frame(messages: Iterable[ServerMessage]) -> bytes:
    """Return the bytes of messages, which keep their order. A batch of mutations must not be empty."""
    by_kind: dict[type, list[Any]] = {kind: [] for kind in _KINDS}
    kinds = bytearray()
    for message in messages:
        kinds.append(_KINDS.index(type(message)))
        by_kind[type(message)].append(message)
    flags = columns(by_kind[SnapshotBegin], "begin_stream", "begin_start", "begin_end", "begin_flags")
    reasons = columns(by_kind[StreamEnd], "stream_end_stream", "stream_end_reason")
    control: Fields = {
        "kinds": bytes(kinds),
        "ok": [_ok(ok) for ok in by_kind[Ok]],
        **columns(by_kind[RollbackRequired], "rollback_stream", "rollback_seqno"),
        "refused_stream": [refused.stream for refused in by_kind[Refused]],
        "refused_error": [encode_error(refused.error) for refused in by_kind[Refused]],
        **flags,
        "begin_flags": bytes(flags["begin_flags"]),
        "mutations_stream": [message.stream for message in by_kind[StreamMutations]],
        "mutations_count": [len(message.mutations) for message in by_kind[StreamMutations]],
        **columns(by_kind[SnapshotEnd], "end_stream", "end_seqno", "end_high"),
        **reasons,
        "stream_end_reason": bytes(reasons["stream_end_reason"]),
        "goodbye": [encode_error(goodbye.error) for goodbye in by_kind[Goodbye]],
    }
    blocks = list(_blocks(by_kind[StreamMutations]))
    control |= {"block_stream": [stream for stream, _ in blocks], **_places([batch for _, batch in blocks])}
    chunks: list[bytes] = []
    for _, batch in blocks:
        times = batch.publish_times
        same = bool((times == times[0]).all())
        block = encode_block(
            batch.messages,
            first_entry=batch.first,
            publish_time=int(times[0]),
            entries=batch.seqnos,
            publish_times=None if same else times,
        )
        chunks += block.chunks
    return join(_SCHEMA, control, chunks)


def _ok(ok: Ok) -> Fields:
    fields = ok._asdict()
    return {**fields, **version_columns(fields.pop("log").versions)}


def _blocks(messages: Sequence[StreamMutations]) -> Iterator[tuple[int, MutationBatch]]:
    """Yield the stream and the mutations of each block: one block per stream, more if its seqnos are too far apart."""
    streams: dict[int, list[MutationBatch]] = {}
    for stream, mutations in messages:
        streams.setdefault(stream, []).append(mutations)
    for stream, parts in streams.items():
        batch = MutationBatch.concat(parts)
        while batch.last - batch.first >= _MAX_SPAN:
            cut = int(np.searchsorted(batch.seqnos, batch.first + _MAX_SPAN))
            yield stream, batch.take(slice(0, cut))
            batch = batch.take(slice(cut, None))
        yield stream, batch


def _places(batches: Sequence[MutationBatch]) -> Fields:
    positions = [batch.positions for batch in batches]
    return {
        "ledgers": _numbers([place.ledgers for place in positions]),
        "entries": _numbers([place.entries for place in positions]),
        "indexes": _numbers([place.indexes for place in positions]),
    }


def _numbers(parts: Sequence[Int64s]) -> bytes:
    if not parts:
        return b""
    column = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return (column[:1] if (column == column[0]).all() else column).astype("<i8", copy=False).tobytes()


# --- decoding ---


def decode_stream_server_frame(frame: bytes) -> tuple[ServerMessage, ...]:
    """Return the messages of these bytes. Raises MalformedFrame; UnsupportedFormat for blocks of a newer release."""
    try:
        control, at = split(_SCHEMA, frame)
        mutations = _read_blocks(frame, at, control)
        ends = ("end_stream", "end_seqno", "end_high")
        by_kind: list[Iterator[ServerMessage]] = [
            map(_read_ok, control["ok"]),
            (RollbackRequired(*row) for row in rows_of(control, "rollbacks", "rollback_stream", "rollback_seqno")),
            _read_refused(control),
            _read_begins(control),
            _read_mutations(control, mutations),
            (SnapshotEnd(*row) for row in rows_of(control, "ends of snapshots", *ends)),
            _read_stream_ends(control),
            (Noop() for _ in range(control["kinds"].count(_KINDS.index(Noop)))),
            (Goodbye(decode_error(error)) for error in control["goodbye"]),
        ]
        return in_order(control["kinds"], by_kind)
    except (ValueError, BadBlock) as error:
        raise MalformedFrame(f"cannot read a frame of the service: {error}; use a client of its release") from None


def _read_ok(fields: Fields) -> Ok:
    log = FailoverLog(versions_of(fields))
    del fields["uuids"], fields["version_seqnos"]
    ok = Ok(**fields, log=log)
    seqnos("an ok", *ok[2:8])
    if not ok.snapshot_start <= ok.start <= ok.snapshot_end:
        raise ValueError(f"an ok starts at {ok.start}, outside [{ok.snapshot_start}, {ok.snapshot_end}]")
    return ok


def _read_refused(control: Fields) -> Iterator[Refused]:
    same_length("refusals", control["refused_stream"], control["refused_error"])
    for stream, error in zip(control["refused_stream"], control["refused_error"], strict=True):
        yield Refused(stream, decode_error(error))


def _read_begins(control: Fields) -> Iterator[SnapshotBegin]:
    names = ("begin_stream", "begin_start", "begin_end", "begin_flags")
    for stream, start, end, flags in rows_of(control, "begins of snapshots", *names):
        if not start <= end or flags > _ALL_FLAGS:
            raise ValueError(f"a snapshot [{start}, {end}] with flags {flags}")
        yield SnapshotBegin(stream, start, end, SnapshotFlag(flags))


def _read_stream_ends(control: Fields) -> Iterator[StreamEnd]:
    for stream, reason in rows_of(control, "ends of streams", "stream_end_stream", "stream_end_reason"):
        yield StreamEnd(stream, EndReason(reason))


def _read_mutations(control: Fields, blocks: dict[int, MutationBatch]) -> Iterator[StreamMutations]:
    done = dict.fromkeys(blocks, 0)
    for stream, count in rows_of(control, "mutations", "mutations_stream", "mutations_count"):
        start = done.get(stream, 0)
        if stream not in blocks or not 0 < count <= len(blocks[stream]) - start:
            raise ValueError(f"stream {stream} has other mutations than its messages announce")
        done[stream] = start + count
        whole = count == len(blocks[stream])
        yield StreamMutations(stream, blocks[stream] if whole else blocks[stream].take(slice(start, start + count)))
    if any(done[stream] != len(batch) for stream, batch in blocks.items()):
        raise ValueError("it has mutations that no message announces")


def _read_blocks(frame: bytes, at: int, control: Fields) -> dict[int, MutationBatch]:
    """Return the mutations of each stream."""
    decoded = []
    for number, stream in enumerate(control["block_stream"]):
        try:
            block, at = decode_foreign_block(frame, at)
        except BadBlock as error:
            raise ValueError(f"block {number}, of stream {stream}: {error}") from None
        decoded.append((stream, block))
    if at != len(frame):
        raise ValueError(f"{len(frame) - at} bytes follow its blocks")
    total = sum(len(block.messages) for _, block in decoded)
    where = Positions(
        _read_numbers(control["ledgers"], total, "ledgers"),
        _read_numbers(control["entries"], total, "entries"),
        _read_numbers(control["indexes"], total, "indexes"),
    )
    streams: dict[int, list[MutationBatch]] = {}
    done = 0
    for stream, (entries, times, messages) in decoded:
        here = slice(done, done + len(messages))
        batch = MutationBatch(entries, where.take(here), times, messages)
        streams.setdefault(stream, []).append(batch)
        done += len(messages)
    return {stream: MutationBatch.concat(parts) for stream, parts in streams.items()}


def _read_numbers(column: bytes, count: int, name: str) -> Int64s:
    if len(column) == 8 and count:
        return np.full(count, int.from_bytes(column, "little", signed=True), np.int64)
    if len(column) != 8 * count:
        raise ValueError(f"{count} mutations have {len(column)} bytes of {name}")
    return np.frombuffer(column, "<i8").astype(np.int64, copy=False)


_HELLO = schema_of("Hello", [("version", "long"), ("name", "string"), ("noop_interval", "double")])
_REQUEST = schema_of(
    "StreamRequest",
    [
        *(("stream", "long"), ("topic", "string"), ("start", "long"), ("end", "long")),
        *(("uuids", LONGS), ("version_seqnos", LONGS), ("snapshot_start", "long"), ("snapshot_end", "long")),
        *(("flags", "long"), ("cluster", "string"), ("incarnation", "string"), ("purge_seqno", "long")),
    ],
)
CLIENT_SCHEMA = schema_of(
    "ClientFrame",
    [
        *(("kinds", "bytes"), ("hello", rows(_HELLO)), ("requests", rows(_REQUEST)), ("close_stream", LONGS)),
        *((f"grant_{name}", LONGS) for name in ("stream", "items", "bytes")),
    ],
)

_CLIENT_SCHEMA = avro.schema(CLIENT_SCHEMA)
_CLIENT_KINDS: tuple[type[ClientMessage], ...] = (StreamHello, StreamRequest, CloseStream, Grant, NoopAnswer)
_ALL_REQUEST_FLAGS = sum(RequestFlag)


def encode_stream_client_frame(messages: Iterable[ClientMessage]) -> bytes:
    """Return the bytes of messages, which keep their order."""
    by_kind: dict[type, list[ClientMessage]] = {kind: [] for kind in _CLIENT_KINDS}
    kinds = bytearray()
    for message in messages:
        kinds.append(_CLIENT_KINDS.index(type(message)))
        by_kind[type(message)].append(message)
    control: Fields = {
        "kinds": bytes(kinds),
        "hello": [hello._asdict() for hello in by_kind[StreamHello]],
        "requests": [_request(one) for one in by_kind[StreamRequest] if isinstance(one, StreamRequest)],
        **columns(by_kind[CloseStream], "close_stream"),
        **columns(by_kind[Grant], "grant_stream", "grant_items", "grant_bytes"),
    }
    return join(_CLIENT_SCHEMA, control, ())


def _request(request: StreamRequest) -> Fields:
    fields = request._asdict()
    return {**fields, **version_columns(fields.pop("versions"))}


def decode_stream_client_frame(frame: bytes) -> tuple[ClientMessage, ...]:
    """Return the messages of these bytes. Raises MalformedFrame."""
    try:
        control, end = split(_CLIENT_SCHEMA, frame)
        if end != len(frame):
            raise ValueError(f"{len(frame) - end} bytes follow its control record")
        by_kind: list[Iterator[ClientMessage]] = [
            (StreamHello(**fields) for fields in control["hello"]),
            map(_read_request, control["requests"]),
            (CloseStream(*row) for row in rows_of(control, "closes", "close_stream")),
            (Grant(*row) for row in rows_of(control, "grants", "grant_stream", "grant_items", "grant_bytes")),
            (NoopAnswer() for _ in range(control["kinds"].count(_CLIENT_KINDS.index(NoopAnswer)))),
        ]
        return in_order(control["kinds"], by_kind)
    except ValueError as error:
        raise MalformedFrame(f"a client's frame can't be read: {error}; use a client of this release") from None


def _read_request(fields: Fields) -> StreamRequest:
    versions = versions_of(fields)
    del fields["uuids"], fields["version_seqnos"]
    request = StreamRequest(**fields, versions=versions)
    if len(versions) > MAX_VERSIONS or not all(map(is_sound, versions)):
        raise ValueError(f"a stream request has {len(versions)} versions, which no failover log can have")
    if request.stream < 1 or not 0 <= request.flags <= _ALL_REQUEST_FLAGS:
        raise ValueError(f"a stream request has the number {request.stream} and flags {int(request.flags)}")
    seqnos("a stream request", *request[2:4], *request[5:7], request.purge_seqno)
    return request._replace(flags=RequestFlag(request.flags))
