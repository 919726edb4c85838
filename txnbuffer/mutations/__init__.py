"""What became visible in a topic, for everybody who wants it: snapshots in memory, cursors, backfills; pure."""

from txnbuffer.mutations.account import Account
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.cursor import Cursor, Item, Slice, SnapshotEnd, SnapshotStart
from txnbuffer.mutations.effects import Effect, ReadLog, StopReading, Wake
from txnbuffer.mutations.index import Anchor, IndexColumns, IndexEntry, SnapshotIndex
from txnbuffer.mutations.manager import MutationManager
from txnbuffer.mutations.memory import MemoryBudget, Recovery
from txnbuffer.mutations.statistics import CursorStatistics, ManagerStatistics

__all__ = [
    "Account",
    "Anchor",
    "Cursor",
    "CursorStatistics",
    "Effect",
    "IndexColumns",
    "IndexEntry",
    "Item",
    "ManagerStatistics",
    "MemoryBudget",
    "Mutation",
    "MutationBatch",
    "MutationManager",
    "ReadLog",
    "Recovery",
    "Slice",
    "SnapshotEnd",
    "SnapshotIndex",
    "SnapshotStart",
    "StopReading",
    "Wake",
]
