from broker_io.rpc import log_pb2 as _log_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkFrame(_message.Message):
    __slots__ = ("hello", "follow", "rejoin", "copy_request", "copy_begin", "records", "durable", "rewrite_done", "copy_chunk", "copy_end", "damaged_topics", "checksum", "blocks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    REJOIN_FIELD_NUMBER: _ClassVar[int]
    COPY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    COPY_BEGIN_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REWRITE_DONE_FIELD_NUMBER: _ClassVar[int]
    COPY_CHUNK_FIELD_NUMBER: _ClassVar[int]
    COPY_END_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_TOPICS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    follow: LinkFollow
    rejoin: LinkRejoin
    copy_request: LinkCopyRequest
    copy_begin: LinkCopyBegin
    records: LinkRecords
    durable: LinkDurable
    rewrite_done: LinkRewriteDone
    copy_chunk: LinkCopyChunk
    copy_end: _log_pb2.Empty
    damaged_topics: LinkDamagedTopics
    checksum: int
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., follow: _Optional[_Union[LinkFollow, _Mapping]] = ..., rejoin: _Optional[_Union[LinkRejoin, _Mapping]] = ..., copy_request: _Optional[_Union[LinkCopyRequest, _Mapping]] = ..., copy_begin: _Optional[_Union[LinkCopyBegin, _Mapping]] = ..., records: _Optional[_Union[LinkRecords, _Mapping]] = ..., durable: _Optional[_Union[LinkDurable, _Mapping]] = ..., rewrite_done: _Optional[_Union[LinkRewriteDone, _Mapping]] = ..., copy_chunk: _Optional[_Union[LinkCopyChunk, _Mapping]] = ..., copy_end: _Optional[_Union[_log_pb2.Empty, _Mapping]] = ..., damaged_topics: _Optional[_Union[LinkDamagedTopics, _Mapping]] = ..., checksum: _Optional[int] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LinkMark(_message.Message):
    __slots__ = ("epoch", "lsn", "chain")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LSN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lsn: int
    chain: int
    def __init__(self, epoch: _Optional[int] = ..., lsn: _Optional[int] = ..., chain: _Optional[int] = ...) -> None: ...

class LinkFork(_message.Message):
    __slots__ = ("epoch", "before")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    before: LinkMark
    def __init__(self, epoch: _Optional[int] = ..., before: _Optional[_Union[LinkMark, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("epoch", "store", "end", "commit", "partial")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    end: LinkMark
    commit: LinkMark
    partial: bool
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., end: _Optional[_Union[LinkMark, _Mapping]] = ..., commit: _Optional[_Union[LinkMark, _Mapping]] = ..., partial: _Optional[bool] = ...) -> None: ...

class LinkFollow(_message.Message):
    __slots__ = ("epoch", "store", "after", "commit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    after: LinkMark
    commit: int
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., after: _Optional[_Union[LinkMark, _Mapping]] = ..., commit: _Optional[int] = ...) -> None: ...

class LinkRejoin(_message.Message):
    __slots__ = ("epoch", "store", "plan", "after")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    plan: str
    after: LinkMark
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., plan: _Optional[str] = ..., after: _Optional[_Union[LinkMark, _Mapping]] = ...) -> None: ...

class LinkCopyRequest(_message.Message):
    __slots__ = ("epoch", "store")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ...) -> None: ...

class LinkCopyBegin(_message.Message):
    __slots__ = ("epoch", "store", "at", "forks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    at: LinkMark
    forks: _containers.RepeatedCompositeFieldContainer[LinkFork]
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., at: _Optional[_Union[LinkMark, _Mapping]] = ..., forks: _Optional[_Iterable[_Union[LinkFork, _Mapping]]] = ...) -> None: ...

class LinkRecords(_message.Message):
    __slots__ = ("epoch", "store", "commit", "epochs", "lsns", "chains", "commits", "kinds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LSNS_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    commit: int
    epochs: _containers.RepeatedScalarFieldContainer[int]
    lsns: _containers.RepeatedScalarFieldContainer[int]
    chains: _containers.RepeatedScalarFieldContainer[int]
    commits: _containers.RepeatedScalarFieldContainer[int]
    kinds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., commit: _Optional[int] = ..., epochs: _Optional[_Iterable[int]] = ..., lsns: _Optional[_Iterable[int]] = ..., chains: _Optional[_Iterable[int]] = ..., commits: _Optional[_Iterable[int]] = ..., kinds: _Optional[_Iterable[int]] = ...) -> None: ...

class LinkDurable(_message.Message):
    __slots__ = ("epoch", "store", "mark", "applied", "full")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    mark: LinkMark
    applied: int
    full: bool
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., mark: _Optional[_Union[LinkMark, _Mapping]] = ..., applied: _Optional[int] = ..., full: _Optional[bool] = ...) -> None: ...

class LinkRewriteDone(_message.Message):
    __slots__ = ("epoch", "store", "numbers", "lengths", "digests")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    numbers: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., numbers: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LinkDamagedTopics(_message.Message):
    __slots__ = ("epoch", "store", "topics")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store: bytes
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., store: _Optional[bytes] = ..., topics: _Optional[_Iterable[str]] = ...) -> None: ...

class LinkCopyChunk(_message.Message):
    __slots__ = ("name", "offset", "crc")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    crc: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., crc: _Optional[int] = ...) -> None: ...

class LinkFetch(_message.Message):
    __slots__ = ("name", "offset", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    size: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class LinkFetched(_message.Message):
    __slots__ = ("data", "crc")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    crc: int
    def __init__(self, data: _Optional[bytes] = ..., crc: _Optional[int] = ...) -> None: ...
