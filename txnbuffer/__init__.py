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
    from broker_io import PulsarOptions as PulsarOptions
    from broker_io.errors import AppendUnknown as AppendUnknown
    from broker_io.errors import CallerError as CallerError
    from broker_io.errors import Damaged as Damaged
    from broker_io.errors import DiskFailed as DiskFailed
    from broker_io.errors import DiskFull as DiskFull
    from broker_io.errors import DiskWatermark as DiskWatermark
    from broker_io.errors import EnvironmentFault as EnvironmentFault
    from broker_io.errors import Error as Error
    from broker_io.errors import InvalidAddress as InvalidAddress
    from broker_io.errors import InvalidMessage as InvalidMessage
    from broker_io.errors import InvalidTopicName as InvalidTopicName
    from broker_io.errors import Locked as Locked
    from broker_io.errors import MessageTooLarge as MessageTooLarge
    from broker_io.errors import MissingDependency as MissingDependency
    from broker_io.errors import NotSupported as NotSupported
    from broker_io.errors import PeerError as PeerError
    from broker_io.errors import PositionTrimmed as PositionTrimmed
    from broker_io.errors import ReadOnly as ReadOnly
    from broker_io.errors import StorageError as StorageError
    from broker_io.errors import TooManyFiles as TooManyFiles
    from broker_io.errors import TooManyStreams as TooManyStreams
    from broker_io.errors import TopicNotFound as TopicNotFound
    from broker_io.errors import UnknownOption as UnknownOption
    from broker_io.errors import UnsupportedFormat as UnsupportedFormat
    from broker_io.errors import UntrustedService as UntrustedService
    from snapshots.errors import TopicDamaged as TopicDamaged
    from txnbuffer.buffer.held_back import HeldBack as HeldBack
    from txnbuffer.client.client import Client as Client
    from txnbuffer.client.database_transaction import DatabaseTransaction as DatabaseTransaction
    from txnbuffer.client.database_transaction import OutboxStatus as OutboxStatus
    from txnbuffer.client.database_transaction import SyncDatabaseTransaction as SyncDatabaseTransaction
    from txnbuffer.client.groups.handling import Processed as Processed
    from txnbuffer.client.groups.handling import dead_letter as dead_letter
    from txnbuffer.client.partition_streams import stream_partitions as stream_partitions
    from txnbuffer.client.reading.async_reader import AsyncReader as AsyncReader
    from txnbuffer.client.reading.reader import CommittedReader as CommittedReader
    from txnbuffer.client.reading.records import Record as Record
    from txnbuffer.client.reading.records import RecordBatch as RecordBatch
    from txnbuffer.client.reading.starts import Seqno as Seqno
    from txnbuffer.client.serializers import AvroDeserializer as AvroDeserializer
    from txnbuffer.client.serializers import AvroSerializer as AvroSerializer
    from txnbuffer.client.serializers import Deserializer as Deserializer
    from txnbuffer.client.serializers import JsonDeserializer as JsonDeserializer
    from txnbuffer.client.serializers import JsonSerializer as JsonSerializer
    from txnbuffer.client.serializers import ProtobufDeserializer as ProtobufDeserializer
    from txnbuffer.client.serializers import ProtobufSerializer as ProtobufSerializer
    from txnbuffer.client.serializers import PydanticDeserializer as PydanticDeserializer
    from txnbuffer.client.serializers import PydanticSerializer as PydanticSerializer
    from txnbuffer.client.serializers import RegistryDeserializer as RegistryDeserializer
    from txnbuffer.client.serializers import RegistrySerializer as RegistrySerializer
    from txnbuffer.client.serializers import Serializer as Serializer
    from txnbuffer.client.streams.streams import ChangeBatch as ChangeBatch
    from txnbuffer.client.streams.streams import ChangeStream as ChangeStream
    from txnbuffer.client.streams.streams import Rollback as Rollback
    from txnbuffer.client.streams.tokens import CallbackTokens as CallbackTokens
    from txnbuffer.client.streams.tokens import FileTokens as FileTokens
    from txnbuffer.client.streams.tokens import MemoryTokens as MemoryTokens
    from txnbuffer.client.streams.tokens import SQLiteTokens as SQLiteTokens
    from txnbuffer.client.streams.tokens import TokenStore as TokenStore
    from txnbuffer.client.sync.sync_client import SyncClient as SyncClient
    from txnbuffer.client.sync.sync_transaction import SyncTransaction as SyncTransaction
    from txnbuffer.client.transaction import Transaction as Transaction
    from txnbuffer.databases.links import Database as Database
    from txnbuffer.databases.outbox import Outbox as Outbox
    from txnbuffer.errors import AlreadyCommitted as AlreadyCommitted
    from txnbuffer.errors import BackfillFailed as BackfillFailed
    from txnbuffer.errors import ClientBroken as ClientBroken
    from txnbuffer.errors import Fenced as Fenced
    from txnbuffer.errors import ForeignOutbox as ForeignOutbox
    from txnbuffer.errors import ForeignSink as ForeignSink
    from txnbuffer.errors import ForeignToken as ForeignToken
    from txnbuffer.errors import HandlerTooSlow as HandlerTooSlow
    from txnbuffer.errors import InvalidHandler as InvalidHandler
    from txnbuffer.errors import InvalidRequest as InvalidRequest
    from txnbuffer.errors import LimitExceeded as LimitExceeded
    from txnbuffer.errors import LogReplaced as LogReplaced
    from txnbuffer.errors import LogRestored as LogRestored
    from txnbuffer.errors import MutationsTrimmed as MutationsTrimmed
    from txnbuffer.errors import NotAuthorized as NotAuthorized
    from txnbuffer.errors import NotVisible as NotVisible
    from txnbuffer.errors import OutboxMissing as OutboxMissing
    from txnbuffer.errors import OutboxStopped as OutboxStopped
    from txnbuffer.errors import OutcomeForgotten as OutcomeForgotten
    from txnbuffer.errors import OutcomeUnknown as OutcomeUnknown
    from txnbuffer.errors import ProducerFenced as ProducerFenced
    from txnbuffer.errors import RegistrationRefused as RegistrationRefused
    from txnbuffer.errors import RelayBranched as RelayBranched
    from txnbuffer.errors import RelayTargetTaken as RelayTargetTaken
    from txnbuffer.errors import SendUnknown as SendUnknown
    from txnbuffer.errors import SeqnoOutOfRange as SeqnoOutOfRange
    from txnbuffer.errors import ServiceUnavailable as ServiceUnavailable
    from txnbuffer.errors import SinkFailed as SinkFailed
    from txnbuffer.errors import SinkFull as SinkFull
    from txnbuffer.errors import SinkLocked as SinkLocked
    from txnbuffer.errors import StaleGeneration as StaleGeneration
    from txnbuffer.errors import StreamBranched as StreamBranched
    from txnbuffer.errors import StreamClosed as StreamClosed
    from txnbuffer.errors import StreamFenced as StreamFenced
    from txnbuffer.errors import StreamMemoryExhausted as StreamMemoryExhausted
    from txnbuffer.errors import StreamTooSlow as StreamTooSlow
    from txnbuffer.errors import StreamTopicDeleted as StreamTopicDeleted
    from txnbuffer.errors import StreamTrimmed as StreamTrimmed
    from txnbuffer.errors import TokensFailed as TokensFailed
    from txnbuffer.errors import TooManyCursors as TooManyCursors
    from txnbuffer.errors import TooManyTopics as TooManyTopics
    from txnbuffer.errors import TooManyTransactions as TooManyTransactions
    from txnbuffer.errors import TopicInUse as TopicInUse
    from txnbuffer.errors import TransactionAborted as TransactionAborted
    from txnbuffer.errors import TransactionCommitted as TransactionCommitted
    from txnbuffer.errors import Unauthenticated as Unauthenticated
    from txnbuffer.errors import UndecodableValue as UndecodableValue
    from txnbuffer.errors import UnknownCursor as UnknownCursor
    from txnbuffer.errors import UnknownTransaction as UnknownTransaction
    from txnbuffer.errors import UnreadableToken as UnreadableToken
    from txnbuffer.errors import UnsafeDatabase as UnsafeDatabase
    from txnbuffer.errors import UsedAfterFork as UsedAfterFork
    from txnbuffer.model import Outcome as Outcome
    from txnbuffer.model import Position as Position
    from txnbuffer.model import TxnId as TxnId
    from txnbuffer.opening import connect as connect
    from txnbuffer.progress import Progress as Progress
    from txnbuffer.progress import progress_bar as progress_bar
    from txnbuffer.progress import reporting as reporting
    from txnbuffer.streams.failover import ResumeToken as ResumeToken

__version__ = "0.2.0"
"""The version of this release; the build takes it from this line."""

_HOMES = {
    "broker_io": "PulsarOptions",
    "broker_io.errors": (
        "AppendUnknown CallerError Damaged DiskFailed DiskFull DiskWatermark EnvironmentFault Error InvalidAddress "
        "InvalidMessage InvalidTopicName Locked MessageTooLarge MissingDependency NotSupported PeerError "
        "PositionTrimmed ReadOnly StorageError TooManyFiles TooManyStreams TopicNotFound UnknownOption "
        "UnsupportedFormat UntrustedService"
    ),
    "snapshots.errors": "TopicDamaged",
    "txnbuffer.buffer.held_back": "HeldBack",
    "txnbuffer.client.reading.async_reader": "AsyncReader",
    "txnbuffer.client.client": "Client",
    "txnbuffer.client.groups.handling": "Processed dead_letter",
    "txnbuffer.client.partition_streams": "stream_partitions",
    "txnbuffer.client.reading.reader": "CommittedReader",
    "txnbuffer.client.reading.records": "Record RecordBatch",
    "txnbuffer.client.serializers": (
        "AvroDeserializer AvroSerializer Deserializer JsonDeserializer JsonSerializer ProtobufDeserializer "
        "ProtobufSerializer PydanticDeserializer PydanticSerializer RegistryDeserializer RegistrySerializer "
        "Serializer"
    ),
    "txnbuffer.client.reading.starts": "Seqno",
    "txnbuffer.client.streams.streams": "ChangeBatch ChangeStream Rollback",
    "txnbuffer.client.sync.sync_client": "SyncClient",
    "txnbuffer.client.sync.sync_transaction": "SyncTransaction",
    "txnbuffer.client.streams.tokens": "CallbackTokens FileTokens MemoryTokens SQLiteTokens TokenStore",
    "txnbuffer.client.transaction": "Transaction",
    "txnbuffer.databases.links": "Database",
    "txnbuffer.databases.outbox": "Outbox",
    "txnbuffer.client.database_transaction": "DatabaseTransaction OutboxStatus SyncDatabaseTransaction",
    "txnbuffer.errors": (
        "AlreadyCommitted BackfillFailed ClientBroken Fenced ForeignOutbox ForeignSink ForeignToken "
        "HandlerTooSlow InvalidHandler InvalidRequest LimitExceeded LogReplaced LogRestored MutationsTrimmed "
        "NotAuthorized NotVisible OutboxMissing OutboxStopped OutcomeForgotten OutcomeUnknown ProducerFenced "
        "RegistrationRefused RelayBranched RelayTargetTaken SendUnknown SeqnoOutOfRange ServiceUnavailable "
        "SinkFailed SinkFull SinkLocked StaleGeneration StreamBranched StreamClosed StreamFenced "
        "StreamMemoryExhausted StreamTooSlow StreamTopicDeleted StreamTrimmed TokensFailed TooManyCursors "
        "TooManyTopics TooManyTransactions TopicInUse TransactionAborted TransactionCommitted Unauthenticated "
        "UndecodableValue UnknownCursor UnknownTransaction UnreadableToken UnsafeDatabase UsedAfterFork"
    ),
    "txnbuffer.opening": "connect",
    "txnbuffer.model": "Outcome Position TxnId",
    "txnbuffer.progress": "Progress progress_bar reporting",
    "txnbuffer.streams.failover": "ResumeToken",
}
"""The names of each module that this one has, as above."""
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # which would accept any name
    __all__ = sorted(_HOME)

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'txnbuffer' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*_HOME]
