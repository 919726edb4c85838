from broker_io.rpc import log_pb2 as _log_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamClientFrame(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StreamClientMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[StreamClientMessage, _Mapping]]] = ...) -> None: ...

class StreamClientMessage(_message.Message):
    __slots__ = ("hello", "request", "close", "grant", "noop_answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    NOOP_ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: StreamHello
    request: StreamRequest
    close: CloseStream
    grant: StreamGrant
    noop_answer: _log_pb2.Empty
    def __init__(self, hello: _Optional[_Union[StreamHello, _Mapping]] = ..., request: _Optional[_Union[StreamRequest, _Mapping]] = ..., close: _Optional[_Union[CloseStream, _Mapping]] = ..., grant: _Optional[_Union[StreamGrant, _Mapping]] = ..., noop_answer: _Optional[_Union[_log_pb2.Empty, _Mapping]] = ...) -> None: ...

class StreamHello(_message.Message):
    __slots__ = ("name", "noop_interval")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOOP_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    noop_interval: float
    def __init__(self, name: _Optional[str] = ..., noop_interval: _Optional[float] = ...) -> None: ...

class HistoryVersion(_message.Message):
    __slots__ = ("uuid", "seqno")
    UUID_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    uuid: int
    seqno: int
    def __init__(self, uuid: _Optional[int] = ..., seqno: _Optional[int] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("stream", "topic", "start", "end", "versions", "snapshot_start", "snapshot_end", "flags", "cluster", "incarnation", "purge_seqno")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_START_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PURGE_SEQNO_FIELD_NUMBER: _ClassVar[int]
    stream: int
    topic: str
    start: int
    end: int
    versions: _containers.RepeatedCompositeFieldContainer[HistoryVersion]
    snapshot_start: int
    snapshot_end: int
    flags: int
    cluster: str
    incarnation: str
    purge_seqno: int
    def __init__(self, stream: _Optional[int] = ..., topic: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[HistoryVersion, _Mapping]]] = ..., snapshot_start: _Optional[int] = ..., snapshot_end: _Optional[int] = ..., flags: _Optional[int] = ..., cluster: _Optional[str] = ..., incarnation: _Optional[str] = ..., purge_seqno: _Optional[int] = ...) -> None: ...

class CloseStream(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: int
    def __init__(self, stream: _Optional[int] = ...) -> None: ...

class StreamGrant(_message.Message):
    __slots__ = ("stream", "items", "bytes")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    items: int
    bytes: int
    def __init__(self, stream: _Optional[int] = ..., items: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class StreamServerFrame(_message.Message):
    __slots__ = ("messages", "block_streams", "ledgers", "entries", "indexes", "blocks")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STREAMS_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StreamServerMessage]
    block_streams: _containers.RepeatedScalarFieldContainer[int]
    ledgers: bytes
    entries: bytes
    indexes: bytes
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages: _Optional[_Iterable[_Union[StreamServerMessage, _Mapping]]] = ..., block_streams: _Optional[_Iterable[int]] = ..., ledgers: _Optional[bytes] = ..., entries: _Optional[bytes] = ..., indexes: _Optional[bytes] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StreamServerMessage(_message.Message):
    __slots__ = ("ok", "rollback", "refused", "begin", "mutations", "snapshot_end", "stream_end", "noop", "goodbye")
    OK_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    STREAM_END_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ok: StreamOk
    rollback: RollbackRequired
    refused: StreamRefused
    begin: SnapshotBegin
    mutations: StreamMutations
    snapshot_end: SnapshotEnd
    stream_end: StreamEnd
    noop: _log_pb2.Empty
    goodbye: _log_pb2.Error
    def __init__(self, ok: _Optional[_Union[StreamOk, _Mapping]] = ..., rollback: _Optional[_Union[RollbackRequired, _Mapping]] = ..., refused: _Optional[_Union[StreamRefused, _Mapping]] = ..., begin: _Optional[_Union[SnapshotBegin, _Mapping]] = ..., mutations: _Optional[_Union[StreamMutations, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., stream_end: _Optional[_Union[StreamEnd, _Mapping]] = ..., noop: _Optional[_Union[_log_pb2.Empty, _Mapping]] = ..., goodbye: _Optional[_Union[_log_pb2.Error, _Mapping]] = ...) -> None: ...

class StreamOk(_message.Message):
    __slots__ = ("stream", "versions", "start", "snapshot_start", "snapshot_end", "end", "high_seqno", "purge_seqno", "cluster", "incarnation")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_START_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HIGH_SEQNO_FIELD_NUMBER: _ClassVar[int]
    PURGE_SEQNO_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    stream: int
    versions: _containers.RepeatedCompositeFieldContainer[HistoryVersion]
    start: int
    snapshot_start: int
    snapshot_end: int
    end: int
    high_seqno: int
    purge_seqno: int
    cluster: str
    incarnation: str
    def __init__(self, stream: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[HistoryVersion, _Mapping]]] = ..., start: _Optional[int] = ..., snapshot_start: _Optional[int] = ..., snapshot_end: _Optional[int] = ..., end: _Optional[int] = ..., high_seqno: _Optional[int] = ..., purge_seqno: _Optional[int] = ..., cluster: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class RollbackRequired(_message.Message):
    __slots__ = ("stream", "seqno")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    stream: int
    seqno: int
    def __init__(self, stream: _Optional[int] = ..., seqno: _Optional[int] = ...) -> None: ...

class StreamRefused(_message.Message):
    __slots__ = ("stream", "error")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream: int
    error: _log_pb2.Error
    def __init__(self, stream: _Optional[int] = ..., error: _Optional[_Union[_log_pb2.Error, _Mapping]] = ...) -> None: ...

class SnapshotBegin(_message.Message):
    __slots__ = ("stream", "start", "end", "flags")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    start: int
    end: int
    flags: int
    def __init__(self, stream: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., flags: _Optional[int] = ...) -> None: ...

class StreamMutations(_message.Message):
    __slots__ = ("stream", "count")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    stream: int
    count: int
    def __init__(self, stream: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("stream", "seqno", "high_seqno")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    HIGH_SEQNO_FIELD_NUMBER: _ClassVar[int]
    stream: int
    seqno: int
    high_seqno: int
    def __init__(self, stream: _Optional[int] = ..., seqno: _Optional[int] = ..., high_seqno: _Optional[int] = ...) -> None: ...

class StreamEnd(_message.Message):
    __slots__ = ("stream", "reason")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stream: int
    reason: int
    def __init__(self, stream: _Optional[int] = ..., reason: _Optional[int] = ...) -> None: ...
