"""The format of change-stream frames from client to server: a control record without blocks

kinds            one byte a message: 0 hello, 1 stream request, 2 close stream, 3 grant, 4 noop answer
hello            version, name, noop_interval in seconds
requests         stream, topic, start, end; the client's versions, newest first: uuids[], version_seqnos[];
                 snapshot_start, snapshot_end; flags (`RequestFlag`); cluster, incarnation, purge_seqno
close_stream     stream
grant_*          stream, items, bytes: totals since the stream was opened
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from txnbuffer import avro
from txnbuffer.errors import MalformedFrame
from txnbuffer.rpc.columns import LONGS, Fields, join, rows, split
from txnbuffer.rpc.stream_server_frames import (
    columns,
    in_order,
    rows_of,
    schema_of,
    seqnos,
    version_columns,
    versions_of,
)
from txnbuffer.streams.failover import MAX_VERSIONS, is_sound
from txnbuffer.streams.messages import (
    ClientMessage,
    CloseStream,
    Grant,
    NoopAnswer,
    RequestFlag,
    StreamHello,
    StreamRequest,
)

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

_SCHEMA = avro.schema(CLIENT_SCHEMA)
_KINDS: tuple[type[ClientMessage], ...] = (StreamHello, StreamRequest, CloseStream, Grant, NoopAnswer)
_ALL_FLAGS = sum(RequestFlag)


def encode_stream_client_frame(messages: Iterable[ClientMessage]) -> bytes:
    """The bytes of messages, in order."""
    by_kind: dict[type, list[ClientMessage]] = {kind: [] for kind in _KINDS}
    kinds = bytearray()
    for message in messages:
        kinds.append(_KINDS.index(type(message)))
        by_kind[type(message)].append(message)
    control: Fields = {
        "kinds": bytes(kinds),
        "hello": [hello._asdict() for hello in by_kind[StreamHello]],
        "requests": [_request(one) for one in by_kind[StreamRequest] if isinstance(one, StreamRequest)],
        **columns(by_kind[CloseStream], "close_stream"),
        **columns(by_kind[Grant], "grant_stream", "grant_items", "grant_bytes"),
    }
    return join(_SCHEMA, control, ())


def _request(request: StreamRequest) -> Fields:
    fields = request._asdict()
    return {**fields, **version_columns(fields.pop("versions"))}


def decode_stream_client_frame(frame: bytes) -> tuple[ClientMessage, ...]:
    """The messages of these bytes. Raises MalformedFrame."""
    try:
        control, end = split(_SCHEMA, frame)
        if end != len(frame):
            raise ValueError(f"{len(frame) - end} bytes follow its control record")
        by_kind: list[Iterator[ClientMessage]] = [
            (StreamHello(**fields) for fields in control["hello"]),
            map(_read_request, control["requests"]),
            (CloseStream(*row) for row in rows_of(control, "closes", "close_stream")),
            (Grant(*row) for row in rows_of(control, "grants", "grant_stream", "grant_items", "grant_bytes")),
            (NoopAnswer() for _ in range(control["kinds"].count(_KINDS.index(NoopAnswer)))),
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
    if request.stream < 1 or not 0 <= request.flags <= _ALL_FLAGS:
        raise ValueError(f"a stream request has the number {request.stream} and flags {int(request.flags)}")
    seqnos("a stream request", *request[2:4], *request[5:7], request.purge_seqno)
    return request._replace(flags=RequestFlag(request.flags))
