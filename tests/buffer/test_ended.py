"""The sets of ended transactions: equal as sets, whatever bytes they have."""

from __future__ import annotations

from dataclasses import replace

from pyroaring import BitMap64

from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import BufferState, CoordinatorState, coordinator_columns


def state_of(committed: BitMap64) -> BufferState:
    columns = coordinator_columns({0: CoordinatorState(1, 1, committed=committed)})
    return replace(TransactionBuffer().snapshot_state(), coordinators=columns)


def test_equal_sets_in_different_bytes_are_no_difference() -> None:
    """Three numbers weigh the same as a list and as a run, and roaring keeps whichever it had."""
    trimmed = BitMap64(range(20))
    trimmed.run_optimize()
    trimmed.remove_range(0, 2)
    trimmed.remove_range(5, 20)
    one, other = state_of(BitMap64([2, 3, 4])), state_of(trimmed)
    assert one.coordinators.committed != other.coordinators.committed
    assert one.differences(other) == []


def test_different_sets_are_a_difference() -> None:
    (line,) = state_of(BitMap64([2, 3])).differences(state_of(BitMap64([2, 4])))
    assert line.startswith("coordinators.committed: [[2, 3]] != [[2, 4]]")
