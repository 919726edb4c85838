"""Transactions for Apache Pulsar from Python.

    from txnbuffer import connect

    async with connect("file:data") as client:
        async with client.transaction() as txn:
            await txn.send("orders", b"...", key="o-1")

Continue with `docs/guide.md`. A name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker_io import PulsarOptions
    from broker_io.errors import (
        AppendUnknown,
        CallerError,
        Damaged,
        DiskFailed,
        DiskFull,
        DiskWatermark,
        EnvironmentFault,
        Error,
        InvalidAddress,
        InvalidMessage,
        InvalidTopicName,
        Locked,
        MessageTooLarge,
        MissingDependency,
        NotSupported,
        PeerError,
        PositionTrimmed,
        ReadOnly,
        StorageError,
        TooManyFiles,
        TooManyStreams,
        TopicNotFound,
        UnknownOption,
        UnsupportedFormat,
        UntrustedService,
    )
    from snapshots.errors import TopicDamaged
    from txnbuffer.buffer.held_back import HeldBack
    from txnbuffer.client.async_reader import AsyncReader
    from txnbuffer.client.client import Client
    from txnbuffer.client.connection import connect
    from txnbuffer.client.handling import Processed, dead_letter
    from txnbuffer.client.partition_streams import stream_partitions
    from txnbuffer.client.reader import CommittedReader
    from txnbuffer.client.records import Record, RecordBatch
    from txnbuffer.client.serializers import (
        AvroDeserializer,
        AvroSerializer,
        Deserializer,
        JsonDeserializer,
        JsonSerializer,
        ProtobufDeserializer,
        ProtobufSerializer,
        PydanticDeserializer,
        PydanticSerializer,
        RegistryDeserializer,
        RegistrySerializer,
        Serializer,
    )
    from txnbuffer.client.starts import Seqno
    from txnbuffer.client.streams import ChangeBatch, ChangeStream, Rollback
    from txnbuffer.client.sync_client import SyncClient
    from txnbuffer.client.sync_transaction import SyncTransaction
    from txnbuffer.client.tokens import CallbackTokens, FileTokens, MemoryTokens, SQLiteTokens, TokenStore
    from txnbuffer.client.transaction import Transaction
    from txnbuffer.errors import (
        AlreadyCommitted,
        BackfillFailed,
        ClientBroken,
        Fenced,
        ForeignSink,
        ForeignToken,
        HandlerTooSlow,
        InvalidHandler,
        InvalidRequest,
        LimitExceeded,
        LogReplaced,
        LogRestored,
        MutationsTrimmed,
        NotAuthorized,
        NotVisible,
        OutcomeForgotten,
        OutcomeUnknown,
        ProducerFenced,
        RegistrationRefused,
        RelayBranched,
        RelayTargetTaken,
        SendUnknown,
        SeqnoOutOfRange,
        ServiceUnavailable,
        SinkFailed,
        SinkFull,
        SinkLocked,
        StaleGeneration,
        StreamBranched,
        StreamClosed,
        StreamFenced,
        StreamMemoryExhausted,
        StreamTooSlow,
        StreamTopicDeleted,
        StreamTrimmed,
        TokensFailed,
        TooManyCursors,
        TooManyTopics,
        TooManyTransactions,
        TopicInUse,
        TransactionAborted,
        TransactionCommitted,
        Unauthenticated,
        UndecodableValue,
        UnknownCursor,
        UnknownTransaction,
        UnreadableToken,
        UsedAfterFork,
    )
    from txnbuffer.model import Outcome, Position, TxnId
    from txnbuffer.progress import Progress, progress_bar, reporting
    from txnbuffer.streams.failover import ResumeToken

__all__ = [
    "AlreadyCommitted",
    "AppendUnknown",
    "AsyncReader",
    "AvroDeserializer",
    "AvroSerializer",
    "BackfillFailed",
    "CallbackTokens",
    "CallerError",
    "ChangeBatch",
    "ChangeStream",
    "Client",
    "ClientBroken",
    "CommittedReader",
    "Damaged",
    "Deserializer",
    "DiskFailed",
    "DiskFull",
    "DiskWatermark",
    "EnvironmentFault",
    "Error",
    "Fenced",
    "FileTokens",
    "ForeignSink",
    "ForeignToken",
    "HandlerTooSlow",
    "HeldBack",
    "InvalidAddress",
    "InvalidHandler",
    "InvalidMessage",
    "InvalidRequest",
    "InvalidTopicName",
    "JsonDeserializer",
    "JsonSerializer",
    "LimitExceeded",
    "Locked",
    "LogReplaced",
    "LogRestored",
    "MemoryTokens",
    "MessageTooLarge",
    "MissingDependency",
    "MutationsTrimmed",
    "NotAuthorized",
    "NotSupported",
    "NotVisible",
    "Outcome",
    "OutcomeForgotten",
    "OutcomeUnknown",
    "PeerError",
    "Position",
    "PositionTrimmed",
    "Processed",
    "ProducerFenced",
    "Progress",
    "ProtobufDeserializer",
    "ProtobufSerializer",
    "PulsarOptions",
    "PydanticDeserializer",
    "PydanticSerializer",
    "ReadOnly",
    "Record",
    "RecordBatch",
    "RegistrationRefused",
    "RegistryDeserializer",
    "RegistrySerializer",
    "RelayBranched",
    "RelayTargetTaken",
    "ResumeToken",
    "Rollback",
    "SQLiteTokens",
    "SendUnknown",
    "Seqno",
    "SeqnoOutOfRange",
    "Serializer",
    "ServiceUnavailable",
    "SinkFailed",
    "SinkFull",
    "SinkLocked",
    "StaleGeneration",
    "StorageError",
    "StreamBranched",
    "StreamClosed",
    "StreamFenced",
    "StreamMemoryExhausted",
    "StreamTooSlow",
    "StreamTopicDeleted",
    "StreamTrimmed",
    "SyncClient",
    "SyncTransaction",
    "TokenStore",
    "TokensFailed",
    "TooManyCursors",
    "TooManyFiles",
    "TooManyStreams",
    "TooManyTopics",
    "TooManyTransactions",
    "TopicDamaged",
    "TopicInUse",
    "TopicNotFound",
    "Transaction",
    "TransactionAborted",
    "TransactionCommitted",
    "TxnId",
    "Unauthenticated",
    "UndecodableValue",
    "UnknownCursor",
    "UnknownOption",
    "UnknownTransaction",
    "UnreadableToken",
    "UnsupportedFormat",
    "UntrustedService",
    "UsedAfterFork",
    "connect",
    "dead_letter",
    "progress_bar",
    "reporting",
    "stream_partitions",
]

__version__ = "0.2.0"
"""The version of this release; the build takes it from this line."""

_HOMES = {
    "broker_io": ("PulsarOptions",),
    "broker_io.errors": (
        "AppendUnknown",
        "CallerError",
        "Damaged",
        "DiskFailed",
        "DiskFull",
        "DiskWatermark",
        "EnvironmentFault",
        "Error",
        "InvalidAddress",
        "InvalidMessage",
        "InvalidTopicName",
        "Locked",
        "MessageTooLarge",
        "MissingDependency",
        "NotSupported",
        "PeerError",
        "PositionTrimmed",
        "ReadOnly",
        "StorageError",
        "TooManyFiles",
        "TooManyStreams",
        "TopicNotFound",
        "UnknownOption",
        "UnsupportedFormat",
        "UntrustedService",
    ),
    "snapshots.errors": ("TopicDamaged",),
    "txnbuffer.buffer.held_back": ("HeldBack",),
    "txnbuffer.client.async_reader": ("AsyncReader",),
    "txnbuffer.client.client": ("Client",),
    "txnbuffer.client.connection": ("connect",),
    "txnbuffer.client.handling": (
        "Processed",
        "dead_letter",
    ),
    "txnbuffer.client.partition_streams": ("stream_partitions",),
    "txnbuffer.client.reader": ("CommittedReader",),
    "txnbuffer.client.records": (
        "Record",
        "RecordBatch",
    ),
    "txnbuffer.client.serializers": (
        "AvroDeserializer",
        "AvroSerializer",
        "Deserializer",
        "JsonDeserializer",
        "JsonSerializer",
        "ProtobufDeserializer",
        "ProtobufSerializer",
        "PydanticDeserializer",
        "PydanticSerializer",
        "RegistryDeserializer",
        "RegistrySerializer",
        "Serializer",
    ),
    "txnbuffer.client.starts": ("Seqno",),
    "txnbuffer.client.streams": (
        "ChangeBatch",
        "ChangeStream",
        "Rollback",
    ),
    "txnbuffer.client.sync_client": ("SyncClient",),
    "txnbuffer.client.sync_transaction": ("SyncTransaction",),
    "txnbuffer.client.tokens": (
        "CallbackTokens",
        "FileTokens",
        "MemoryTokens",
        "SQLiteTokens",
        "TokenStore",
    ),
    "txnbuffer.client.transaction": ("Transaction",),
    "txnbuffer.model": (
        "Outcome",
        "Position",
        "TxnId",
    ),
    "txnbuffer.progress": (
        "Progress",
        "progress_bar",
        "reporting",
    ),
    "txnbuffer.streams.failover": ("ResumeToken",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'txnbuffer' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME.get(name, "txnbuffer.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
