"""One topic's transactional state, pure: a fold over its log, the reader's rule, and sequence numbers."""

from txnbuffer.buffer.buffer import PART_SIZE, TransactionBuffer
from txnbuffer.buffer.effects import Damage, Effect, Ended, EpochRaised, Ignored, Reason, Suppressed, Void
from txnbuffer.buffer.items import Items, Part, PartSummary
from txnbuffer.buffer.ongoing import OpenTxn
from txnbuffer.buffer.sequencer import Sequenced, Sequencer, SequencerState, reader_floor
from txnbuffer.buffer.state import (
    NOWHERE,
    BufferState,
    CoordinatorColumns,
    Counters,
    OngoingColumns,
    PartColumns,
)
from txnbuffer.buffer.visibility import decided_rows, visible_counts, visible_mask

__all__ = [
    "NOWHERE",
    "PART_SIZE",
    "BufferState",
    "CoordinatorColumns",
    "Counters",
    "Damage",
    "Effect",
    "Ended",
    "EpochRaised",
    "Ignored",
    "Items",
    "OngoingColumns",
    "OpenTxn",
    "Part",
    "PartColumns",
    "PartSummary",
    "Reason",
    "Sequenced",
    "Sequencer",
    "SequencerState",
    "Suppressed",
    "TransactionBuffer",
    "Void",
    "decided_rows",
    "reader_floor",
    "visible_counts",
    "visible_mask",
]
