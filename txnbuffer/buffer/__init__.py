"""The transactional state of one topic, pure: the buffer folded from its log, visibility and sequence numbers."""

from txnbuffer.buffer.buffer import SEGMENT_SIZE, TransactionBuffer
from txnbuffer.buffer.effects import Damage, Effect, EpochRaised, Ignored, Reason, Suppressed, TransactionEnded, Void
from txnbuffer.buffer.sequencer import Sequenced, Sequencer, SequencerState, reader_floor
from txnbuffer.buffer.sets import OpenTxn
from txnbuffer.buffer.state import (
    NOWHERE,
    BufferSegment,
    BufferState,
    CoordinatorColumns,
    Counters,
    Items,
    OngoingColumns,
    SegmentColumns,
    SegmentSummary,
)
from txnbuffer.buffer.visibility import decided_rows, visible_counts, visible_mask

__all__ = [
    "NOWHERE",
    "SEGMENT_SIZE",
    "BufferSegment",
    "BufferState",
    "CoordinatorColumns",
    "Counters",
    "Damage",
    "Effect",
    "EpochRaised",
    "Ignored",
    "Items",
    "OngoingColumns",
    "OpenTxn",
    "Reason",
    "SegmentColumns",
    "SegmentSummary",
    "Sequenced",
    "Sequencer",
    "SequencerState",
    "Suppressed",
    "TransactionBuffer",
    "TransactionEnded",
    "Void",
    "decided_rows",
    "reader_floor",
    "visible_counts",
    "visible_mask",
]
