from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("name", "fault", "message", "details")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fault: str
    message: str
    details: _containers.RepeatedCompositeFieldContainer[ErrorDetail]
    def __init__(self, name: _Optional[str] = ..., fault: _Optional[str] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[ErrorDetail, _Mapping]]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("name", "number", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    text: str
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class LogPosition(_message.Message):
    __slots__ = ("ledger", "entry", "batch")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ledger: int
    entry: int
    batch: int
    def __init__(self, ledger: _Optional[int] = ..., entry: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TopicRequest(_message.Message):
    __slots__ = ("topic", "number")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    number: int
    def __init__(self, topic: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class LogLimits(_message.Message):
    __slots__ = ("max_message_bytes", "max_append_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_APPEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_append_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_append_bytes: _Optional[int] = ...) -> None: ...

class TopicNames(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class TopicIncarnation(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class LedgerList(_message.Message):
    __slots__ = ("ledgers",)
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ledgers: _containers.RepeatedCompositeFieldContainer[LogLedger]
    def __init__(self, ledgers: _Optional[_Iterable[_Union[LogLedger, _Mapping]]] = ...) -> None: ...

class LogLedger(_message.Message):
    __slots__ = ("ledger", "entries", "bytes", "closed", "lasting", "original")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    LASTING_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_FIELD_NUMBER: _ClassVar[int]
    ledger: int
    entries: int
    bytes: int
    closed: bool
    lasting: bool
    original: bool
    def __init__(self, ledger: _Optional[int] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., closed: _Optional[bool] = ..., lasting: _Optional[bool] = ..., original: _Optional[bool] = ...) -> None: ...

class TopicCompaction(_message.Message):
    __slots__ = ("cleaned", "purged")
    CLEANED_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    cleaned: int
    purged: int
    def __init__(self, cleaned: _Optional[int] = ..., purged: _Optional[int] = ...) -> None: ...

class FoundPosition(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: LogPosition
    def __init__(self, position: _Optional[_Union[LogPosition, _Mapping]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("open", "blocks")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    open: OpenLogWriter
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, open: _Optional[_Union[OpenLogWriter, _Mapping]] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OpenLogWriter(_message.Message):
    __slots__ = ("topic", "exclusive")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    exclusive: bool
    def __init__(self, topic: _Optional[str] = ..., exclusive: _Optional[bool] = ...) -> None: ...

class AppendReply(_message.Message):
    __slots__ = ("counts", "ledgers", "entries", "indexes", "lengths", "errors")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    ledgers: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    errors: _containers.RepeatedCompositeFieldContainer[Error]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., ledgers: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., errors: _Optional[_Iterable[_Union[Error, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("open", "limit", "wait_ms")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    open: OpenLogReader
    limit: int
    wait_ms: int
    def __init__(self, open: _Optional[_Union[OpenLogReader, _Mapping]] = ..., limit: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class OpenLogReader(_message.Message):
    __slots__ = ("topic", "incarnation", "start", "inclusive", "compacted")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    INCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    COMPACTED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    incarnation: str
    start: LogPosition
    inclusive: bool
    compacted: bool
    def __init__(self, topic: _Optional[str] = ..., incarnation: _Optional[str] = ..., start: _Optional[_Union[LogPosition, _Mapping]] = ..., inclusive: _Optional[bool] = ..., compacted: _Optional[bool] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("opened", "ledger", "entries", "indexes", "more", "error", "blocks")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    opened: LogReaderOpened
    ledger: int
    entries: bytes
    indexes: bytes
    more: bool
    error: Error
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, opened: _Optional[_Union[LogReaderOpened, _Mapping]] = ..., ledger: _Optional[int] = ..., entries: _Optional[bytes] = ..., indexes: _Optional[bytes] = ..., more: _Optional[bool] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LogReaderOpened(_message.Message):
    __slots__ = ("incarnation", "after")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    after: LogPosition
    def __init__(self, incarnation: _Optional[str] = ..., after: _Optional[_Union[LogPosition, _Mapping]] = ...) -> None: ...
