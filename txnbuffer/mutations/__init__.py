"""The visible mutations of a topic for any number of readers: snapshots in memory, cursors, backfills; pure"""

from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.cursor import Cursor, CursorSnapshotEnd, Item, Slice, SnapshotStart
from txnbuffer.mutations.manager import (
    CursorStatistics,
    Effect,
    IndexColumns,
    ManagerStatistics,
    MemoryBudget,
    MutationManager,
    ReadLog,
    Recovery,
    SnapshotAnchor,
    SnapshotIndex,
    SnapshotIndexEntry,
    StopReading,
    Wake,
)
from txnbuffer.mutations.snapshot import MemoryAccount

__all__ = [
    "Cursor",
    "CursorSnapshotEnd",
    "CursorStatistics",
    "Effect",
    "IndexColumns",
    "Item",
    "ManagerStatistics",
    "MemoryAccount",
    "MemoryBudget",
    "Mutation",
    "MutationBatch",
    "MutationManager",
    "ReadLog",
    "Recovery",
    "Slice",
    "SnapshotAnchor",
    "SnapshotIndex",
    "SnapshotIndexEntry",
    "SnapshotStart",
    "StopReading",
    "Wake",
]
