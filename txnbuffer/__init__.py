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
    from broker_io.errors import Error, InvalidMessage, InvalidTopicName, MessageTooLarge
    from txnbuffer.client.client import Client
    from txnbuffer.client.connection import connect
    from txnbuffer.client.handling import Processed, dead_letter
    from txnbuffer.client.partition_streams import stream_partitions
    from txnbuffer.client.reader import AsyncReader, CommittedReader
    from txnbuffer.client.records import Record, RecordBatch
    from txnbuffer.client.send_columns import AvroSerializer, JsonSerializer, Serializer
    from txnbuffer.client.streams import ChangeBatch, ChangeStream, Rollback
    from txnbuffer.client.sync_client import SyncClient
    from txnbuffer.client.sync_transaction import SyncTransaction
    from txnbuffer.client.tokens import CallbackTokens, FileTokens, MemoryTokens, SQLiteTokens, TokenStore
    from txnbuffer.client.transaction import Transaction
    from txnbuffer.errors import (
        AlreadyCommitted,
        BackfillFailed,
        Fenced,
        ForeignToken,
        HandlerTooSlow,
        LimitExceeded,
        NotAuthorized,
        NotVisible,
        OutcomeForgotten,
        OutcomeUnknown,
        RelayBranched,
        RelayTargetTaken,
        SendUnknown,
        SeqnoOutOfRange,
        ServiceUnavailable,
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
        TransactionAborted,
        Unauthenticated,
        UnknownCursor,
        UnreadableToken,
        UsedAfterFork,
    )
    from txnbuffer.model import Outcome, Position, TxnId
    from txnbuffer.progress import Progress, progress_bar
    from txnbuffer.streams.failover import ResumeToken

__all__ = [
    "AlreadyCommitted",
    "AsyncReader",
    "AvroSerializer",
    "BackfillFailed",
    "CallbackTokens",
    "ChangeBatch",
    "ChangeStream",
    "Client",
    "CommittedReader",
    "Error",
    "Fenced",
    "FileTokens",
    "ForeignToken",
    "HandlerTooSlow",
    "InvalidMessage",
    "InvalidTopicName",
    "JsonSerializer",
    "LimitExceeded",
    "MemoryTokens",
    "MessageTooLarge",
    "NotAuthorized",
    "NotVisible",
    "Outcome",
    "OutcomeForgotten",
    "OutcomeUnknown",
    "Position",
    "Processed",
    "Progress",
    "Record",
    "RecordBatch",
    "RelayBranched",
    "RelayTargetTaken",
    "ResumeToken",
    "Rollback",
    "SQLiteTokens",
    "SendUnknown",
    "SeqnoOutOfRange",
    "Serializer",
    "ServiceUnavailable",
    "StaleGeneration",
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
    "Transaction",
    "TransactionAborted",
    "TxnId",
    "Unauthenticated",
    "UnknownCursor",
    "UnreadableToken",
    "UsedAfterFork",
    "connect",
    "dead_letter",
    "progress_bar",
    "stream_partitions",
]

_HOMES = {
    "broker_io.errors": (
        "Error",
        "InvalidMessage",
        "InvalidTopicName",
        "MessageTooLarge",
    ),
    "txnbuffer.client.client": ("Client",),
    "txnbuffer.client.connection": ("connect",),
    "txnbuffer.client.handling": (
        "Processed",
        "dead_letter",
    ),
    "txnbuffer.client.partition_streams": ("stream_partitions",),
    "txnbuffer.client.reader": (
        "AsyncReader",
        "CommittedReader",
    ),
    "txnbuffer.client.records": (
        "Record",
        "RecordBatch",
    ),
    "txnbuffer.client.send_columns": (
        "AvroSerializer",
        "JsonSerializer",
        "Serializer",
    ),
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
    ),
    "txnbuffer.streams.failover": ("ResumeToken",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'txnbuffer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "txnbuffer.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
