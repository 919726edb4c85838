from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AdminRequest(_message.Message):
    __slots__ = ("topic", "txn", "group", "cursor", "at", "seconds", "dirty_ratio", "least_lag", "most_lag", "grace", "path")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TXN_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_RATIO_FIELD_NUMBER: _ClassVar[int]
    LEAST_LAG_FIELD_NUMBER: _ClassVar[int]
    MOST_LAG_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    topic: str
    txn: str
    group: str
    cursor: str
    at: str
    seconds: float
    dirty_ratio: float
    least_lag: float
    most_lag: float
    grace: float
    path: str
    def __init__(self, topic: _Optional[str] = ..., txn: _Optional[str] = ..., group: _Optional[str] = ..., cursor: _Optional[str] = ..., at: _Optional[str] = ..., seconds: _Optional[float] = ..., dirty_ratio: _Optional[float] = ..., least_lag: _Optional[float] = ..., most_lag: _Optional[float] = ..., grace: _Optional[float] = ..., path: _Optional[str] = ...) -> None: ...

class AdminAnswer(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
