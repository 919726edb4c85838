from broker_io.rpc import log_pb2 as _log_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransactionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_OPEN: _ClassVar[TransactionState]
    STATE_COMMITTING: _ClassVar[TransactionState]
    STATE_COMMITTED: _ClassVar[TransactionState]
    STATE_ABORTING: _ClassVar[TransactionState]
    STATE_ABORTED: _ClassVar[TransactionState]
STATE_OPEN: TransactionState
STATE_COMMITTING: TransactionState
STATE_COMMITTED: TransactionState
STATE_ABORTING: TransactionState
STATE_ABORTED: TransactionState

class TransactionId(_message.Message):
    __slots__ = ("most", "least")
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    most: int
    least: int
    def __init__(self, most: _Optional[int] = ..., least: _Optional[int] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("hello", "registers", "leases", "open_names", "delete_names", "joins", "members", "begins", "sends", "commits", "aborts", "queries", "returned", "bye", "blocks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMES_FIELD_NUMBER: _ClassVar[int]
    DELETE_NAMES_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    registers: _containers.RepeatedCompositeFieldContainer[NamedRequest]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRequest]
    open_names: _containers.RepeatedCompositeFieldContainer[NamedRequest]
    delete_names: _containers.RepeatedCompositeFieldContainer[Deletion]
    joins: _containers.RepeatedCompositeFieldContainer[NamedRequest]
    members: _containers.RepeatedCompositeFieldContainer[GroupHeartbeat]
    begins: _containers.RepeatedCompositeFieldContainer[Begin]
    sends: _containers.RepeatedCompositeFieldContainer[Send]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    returned: _containers.RepeatedCompositeFieldContainer[IdBlock]
    bye: bool
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., registers: _Optional[_Iterable[_Union[NamedRequest, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseRequest, _Mapping]]] = ..., open_names: _Optional[_Iterable[_Union[NamedRequest, _Mapping]]] = ..., delete_names: _Optional[_Iterable[_Union[Deletion, _Mapping]]] = ..., joins: _Optional[_Iterable[_Union[NamedRequest, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[GroupHeartbeat, _Mapping]]] = ..., begins: _Optional[_Iterable[_Union[Begin, _Mapping]]] = ..., sends: _Optional[_Iterable[_Union[Send, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[IdBlock, _Mapping]]] = ..., bye: _Optional[bool] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session", "open")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    session: str
    open: _containers.RepeatedCompositeFieldContainer[TransactionId]
    def __init__(self, session: _Optional[str] = ..., open: _Optional[_Iterable[_Union[TransactionId, _Mapping]]] = ...) -> None: ...

class NamedRequest(_message.Message):
    __slots__ = ("request", "name")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    request: int
    name: str
    def __init__(self, request: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("request", "size")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    request: int
    size: int
    def __init__(self, request: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Deletion(_message.Message):
    __slots__ = ("request", "name", "over")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    request: int
    name: str
    over: int
    def __init__(self, request: _Optional[int] = ..., name: _Optional[str] = ..., over: _Optional[int] = ...) -> None: ...

class GroupHeartbeat(_message.Message):
    __slots__ = ("request", "group", "member", "topics", "partitions", "ends", "leaves")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    request: int
    group: str
    member: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    partitions: _containers.RepeatedScalarFieldContainer[str]
    ends: _containers.RepeatedCompositeFieldContainer[_log_pb2.LogPosition]
    leaves: bool
    def __init__(self, request: _Optional[int] = ..., group: _Optional[str] = ..., member: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., partitions: _Optional[_Iterable[str]] = ..., ends: _Optional[_Iterable[_Union[_log_pb2.LogPosition, _Mapping]]] = ..., leaves: _Optional[bool] = ...) -> None: ...

class ProducerSequence(_message.Message):
    __slots__ = ("name", "number", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    epoch: int
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("request", "most", "least", "timeout", "details")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    request: int
    most: int
    least: int
    timeout: float
    details: BeginDetails
    def __init__(self, request: _Optional[int] = ..., most: _Optional[int] = ..., least: _Optional[int] = ..., timeout: _Optional[float] = ..., details: _Optional[_Union[BeginDetails, _Mapping]] = ...) -> None: ...

class BeginDetails(_message.Message):
    __slots__ = ("parent", "sequence")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    parent: TransactionId
    sequence: ProducerSequence
    def __init__(self, parent: _Optional[_Union[TransactionId, _Mapping]] = ..., sequence: _Optional[_Union[ProducerSequence, _Mapping]] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request", "most", "least", "topics", "records", "wait_visible", "details")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_VISIBLE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    request: int
    most: int
    least: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    records: _containers.RepeatedScalarFieldContainer[int]
    wait_visible: bool
    details: CommitDetails
    def __init__(self, request: _Optional[int] = ..., most: _Optional[int] = ..., least: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., records: _Optional[_Iterable[int]] = ..., wait_visible: _Optional[bool] = ..., details: _Optional[_Union[CommitDetails, _Mapping]] = ...) -> None: ...

class CommitDetails(_message.Message):
    __slots__ = ("sequence", "winners", "losers", "positions")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WINNERS_FIELD_NUMBER: _ClassVar[int]
    LOSERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: ProducerSequence
    winners: _containers.RepeatedCompositeFieldContainer[Branch]
    losers: _containers.RepeatedCompositeFieldContainer[TransactionId]
    positions: _containers.RepeatedCompositeFieldContainer[ConsumerPosition]
    def __init__(self, sequence: _Optional[_Union[ProducerSequence, _Mapping]] = ..., winners: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., losers: _Optional[_Iterable[_Union[TransactionId, _Mapping]]] = ..., positions: _Optional[_Iterable[_Union[ConsumerPosition, _Mapping]]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("txn", "topics", "records")
    TXN_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    topics: _containers.RepeatedScalarFieldContainer[str]
    records: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., topics: _Optional[_Iterable[str]] = ..., records: _Optional[_Iterable[int]] = ...) -> None: ...

class ConsumerPosition(_message.Message):
    __slots__ = ("group", "topic", "generation", "start", "end")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    generation: int
    start: _log_pb2.LogPosition
    end: _log_pb2.LogPosition
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ..., generation: _Optional[int] = ..., start: _Optional[_Union[_log_pb2.LogPosition, _Mapping]] = ..., end: _Optional[_Union[_log_pb2.LogPosition, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request", "most", "least", "topics")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    request: int
    most: int
    least: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[int] = ..., most: _Optional[int] = ..., least: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("request", "most", "least")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    request: int
    most: int
    least: int
    def __init__(self, request: _Optional[int] = ..., most: _Optional[int] = ..., least: _Optional[int] = ...) -> None: ...

class IdBlock(_message.Message):
    __slots__ = ("first", "size")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    first: int
    size: int
    def __init__(self, first: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("welcome", "acknowledged", "failures", "answers", "credits", "draining", "goodbye", "committed", "aborted", "settled")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    acknowledged: int
    failures: _containers.RepeatedCompositeFieldContainer[SendFailure]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    credits: int
    draining: bool
    goodbye: _log_pb2.Error
    committed: _containers.RepeatedScalarFieldContainer[int]
    aborted: _containers.RepeatedScalarFieldContainer[int]
    settled: bool
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., acknowledged: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[SendFailure, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., credits: _Optional[int] = ..., draining: _Optional[bool] = ..., goodbye: _Optional[_Union[_log_pb2.Error, _Mapping]] = ..., committed: _Optional[_Iterable[int]] = ..., aborted: _Optional[_Iterable[int]] = ..., settled: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "shard", "epoch", "max_message_bytes", "states")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    session: str
    shard: int
    epoch: int
    max_message_bytes: int
    states: _containers.RepeatedCompositeFieldContainer[KnownState]
    def __init__(self, session: _Optional[str] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., states: _Optional[_Iterable[_Union[KnownState, _Mapping]]] = ...) -> None: ...

class KnownState(_message.Message):
    __slots__ = ("txn", "state", "error")
    TXN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    state: TransactionState
    error: _log_pb2.Error
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., state: _Optional[_Union[TransactionState, str]] = ..., error: _Optional[_Union[_log_pb2.Error, _Mapping]] = ...) -> None: ...

class SendFailure(_message.Message):
    __slots__ = ("send", "error", "txn")
    SEND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TXN_FIELD_NUMBER: _ClassVar[int]
    send: int
    error: _log_pb2.Error
    txn: TransactionId
    def __init__(self, send: _Optional[int] = ..., error: _Optional[_Union[_log_pb2.Error, _Mapping]] = ..., txn: _Optional[_Union[TransactionId, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("request", "state", "done", "leased", "opened", "joined", "assignments", "error")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request: int
    state: TransactionState
    done: _log_pb2.Empty
    leased: IdBlock
    opened: NameOpened
    joined: GroupJoined
    assignments: MemberAssignments
    error: _log_pb2.Error
    def __init__(self, request: _Optional[int] = ..., state: _Optional[_Union[TransactionState, str]] = ..., done: _Optional[_Union[_log_pb2.Empty, _Mapping]] = ..., leased: _Optional[_Union[IdBlock, _Mapping]] = ..., opened: _Optional[_Union[NameOpened, _Mapping]] = ..., joined: _Optional[_Union[GroupJoined, _Mapping]] = ..., assignments: _Optional[_Union[MemberAssignments, _Mapping]] = ..., error: _Optional[_Union[_log_pb2.Error, _Mapping]] = ...) -> None: ...

class NameOpened(_message.Message):
    __slots__ = ("epoch", "committed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    committed: int
    def __init__(self, epoch: _Optional[int] = ..., committed: _Optional[int] = ...) -> None: ...

class GroupJoined(_message.Message):
    __slots__ = ("generation", "topics", "positions")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    positions: _containers.RepeatedCompositeFieldContainer[_log_pb2.LogPosition]
    def __init__(self, generation: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., positions: _Optional[_Iterable[_Union[_log_pb2.LogPosition, _Mapping]]] = ...) -> None: ...

class MemberAssignments(_message.Message):
    __slots__ = ("generation", "unsettled", "assignments")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    unsettled: bool
    assignments: _containers.RepeatedCompositeFieldContainer[PartitionAssignment]
    def __init__(self, generation: _Optional[int] = ..., unsettled: _Optional[bool] = ..., assignments: _Optional[_Iterable[_Union[PartitionAssignment, _Mapping]]] = ...) -> None: ...

class PartitionAssignment(_message.Message):
    __slots__ = ("partition", "since", "end")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    partition: str
    since: int
    end: _log_pb2.LogPosition
    def __init__(self, partition: _Optional[str] = ..., since: _Optional[int] = ..., end: _Optional[_Union[_log_pb2.LogPosition, _Mapping]] = ...) -> None: ...
