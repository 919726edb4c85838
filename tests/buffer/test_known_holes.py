"""Holes of earlier designs that concern the buffer: P-rows of keyed snapshots, U-rows of the shipped ones."""

from __future__ import annotations

from itertools import permutations

import pytest
from buffer.buffer_driver import folded, numbered, visible
from histories import Log, marker

from broker_io.batch import Message
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.errors import ProtocolStopped, UndecodableMarker, UnsupportedProtocol
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import VERSION, encode_marker

COMMIT, ABORT = Outcome.COMMIT, Outcome.ABORT


def aborts(log: Log, *numbers: int) -> None:
    for number in numbers:
        log.record(TxnId(0, number), 1)
        log.end(TxnId(0, number), ABORT)


def test_row_p4_aborts_are_in_marker_order_not_in_that_of_ids() -> None:
    log = Log()
    for number in (1, 2, 3, 5):
        log.record(TxnId(0, number), 1)
    for number in (1, 3, 5, 2):
        log.end(TxnId(0, number), ABORT)
    owner = folded(log, segment_size=2)
    assert [part.items.least.tolist() for part in owner.segments.values()] == [[1, 3]]
    assert owner.buffer.snapshot_state().unsealed.least.tolist() == [5, 2]
    markers = [*owner.segments[1].items.markers, *owner.buffer.snapshot_state().unsealed.markers]
    assert markers == sorted(markers)


def test_row_p4_a_late_abort_never_changes_a_sealed_segment() -> None:
    log = Log()
    log.record(TxnId(0, 2), 1)
    aborts(log, 1, 3, 5)
    owner = folded(log, segment_size=2)
    sealed = owner.segments[1].items.least.tolist()
    log.end(TxnId(0, 2), ABORT)
    aborts(log, 4)
    owner.apply(log, 7)
    assert owner.segments[1].items.least.tolist() == sealed == [1, 3]
    assert owner.segments[2].items.least.tolist() == [5, 2]


def test_row_p9_max_read_comes_from_the_state_not_from_segments() -> None:
    log = Log()
    log.record(TxnId(0, 9), 1)
    aborts(log, 1, 2, 3)
    owner = folded(log, segment_size=1).recovered()
    assert owner.buffer.max_read_position is None
    assert owner.buffer.snapshot_state().max_read is None


def test_row_u3_a_topic_that_stopped_shows_nothing_from_there_on_and_stays_stopped() -> None:
    log = Log()
    shown = log.record(None)
    log.record(None)
    log.messages[1] = Message(None, b"junk", encode_marker(marker()).properties)
    log.record(None)
    buffer = TransactionBuffer()
    (placed,) = log.batches()
    with pytest.raises(UndecodableMarker) as caught:
        buffer.apply_batch(placed)
    assert caught.value.position == log.events[1].position
    assert buffer.applied == buffer.max_read_position == shown
    assert visible(log, buffer) == [shown]
    for start in (1, 2):
        with pytest.raises(ProtocolStopped):
            buffer.apply_batch(next(log.batches(start)))
    assert visible(log, buffer) == [shown]


def test_row_u3_what_came_before_the_stop_keeps_its_effects() -> None:
    log = Log()
    log.record(TxnId(0, 1), 1)
    log.end(TxnId(0, 1), COMMIT, 1)
    log.record(None)
    log.messages[2] = Message(b"k", b"v", {VERSION: "2"})
    buffer = TransactionBuffer()
    with pytest.raises(UnsupportedProtocol) as caught:
        buffer.apply_batch(next(log.batches()))
    assert [type(effect).__name__ for effect in caught.value.effects] == ["TransactionEnded", "EpochRaised"]
    named = caught.value.of_topic("orders")
    assert str(named).startswith("topic orders stopped at 1:2: ")
    assert (named.effects, named.position, named.topic) == (caught.value.effects, caught.value.position, "orders")


def test_row_u4_an_abort_is_counted_once_and_trimming_one_segment_leaves_the_ids_of_others() -> None:
    log = Log()
    aborts(log, 1, 2)
    log.new_ledger()
    log.end(TxnId(0, 1), ABORT)
    log.again(0, 2)
    aborts(log, 3, 4)
    owner = folded(log, segment_size=2)
    assert [part.items.least.tolist() for part in owner.segments.values()] == [[1, 2], [3]]
    assert owner.buffer.aborted.ids() == [TxnId(0, number) for number in (1, 2, 3, 4)]
    owner.trim(2)
    assert owner.buffer.aborted.ids() == [TxnId(0, 3), TxnId(0, 4)]


def test_row_u4_forgetting_a_segment_twice_changes_nothing_and_a_live_one_is_refused() -> None:
    log = Log()
    aborts(log, 1, 2)
    log.new_ledger()
    aborts(log, 3, 4, 5)
    owner = folded(log, segment_size=2)
    first, second = owner.segments[1], owner.segments[2]
    assert owner.buffer.trim(2) == [1]
    owner.buffer.forget(first)
    owner.buffer.forget(first)
    assert owner.buffer.aborted.ids() == [TxnId(0, number) for number in (3, 4, 5)]
    with pytest.raises(ValueError, match="segment 2 was not dropped"):
        owner.buffer.forget(second)
    assert owner.buffer.is_aborted(TxnId(0, 3))


def test_row_u5_a_committed_record_stays_readable_after_a_late_one_is_aborted() -> None:
    log, txn = Log(), TxnId(0, 1)
    m1 = log.record(txn, 1)
    log.end(txn, COMMIT, 1)
    m2 = log.record(txn, 2)
    log.mark(marker(lwm=1))
    log.end(txn, ABORT)
    owner = folded(log)
    assert visible(log, owner.buffer) == [m1]
    assert owner.buffer.suppressed.ranges() == [(m2, m2)]
    assert visible(log, owner.recovered().buffer) == [m1]


def test_row_u6_the_state_holds_the_real_max_read_also_while_a_replay_is_under_way() -> None:
    log = Log()
    log.records(None, 0, 3)
    owner = folded(log)
    owner.buffer.replay_until(log.record(None))
    assert owner.buffer.max_read_position is None
    assert owner.buffer.snapshot_state().max_read == log.events[2].position


@pytest.mark.parametrize("order", [*permutations([2, 3, 4])])
def test_row_u11_ledgers_that_vanish_out_of_order_take_nothing_with_them(order: tuple[int, ...]) -> None:
    log = Log()
    for number in range(1, 5):
        aborts(log, number)
        log.new_ledger()
    aborts(log, 5, 6)
    existing = {1, 2, 3, 4, 5}
    owner = folded(log, segment_size=1)
    for gone in order:
        existing -= {gone}
        owner.trim(min(existing))
        assert owner.buffer.is_aborted(TxnId(0, 1))
    existing -= {1}
    owner.trim(min(existing))
    assert owner.buffer.aborted.ids() == [TxnId(0, 5), TxnId(0, 6)]


def test_row_u11_a_segment_across_ledgers_stays_until_its_last_items_ledger_is_gone() -> None:
    log = Log()
    aborts(log, 1)
    log.new_ledger()
    aborts(log, 2)
    log.new_ledger()
    aborts(log, 3)
    owner = folded(log, segment_size=2)
    assert [part.summary for part in owner.segments.values()] == [(1, 2, 2, 0)]
    owner.trim(2)
    assert owner.buffer.aborted.ids() == [TxnId(0, number) for number in (1, 2, 3)]
    owner.trim(3)
    assert owner.buffer.aborted.ids() == [TxnId(0, 3)]


def test_suppressed_ranges_of_trimmed_ledgers_do_not_come_back_with_a_recovery() -> None:
    log = Log()
    log.end(TxnId(0, 1), ABORT)
    log.record(TxnId(0, 1), 1)
    log.new_ledger()
    late = log.record(TxnId(0, 1), 2)
    owner = folded(log)
    assert len(owner.buffer.suppressed) == 2
    owner.trim(2)
    assert owner.buffer.suppressed.ranges() == [(late, late)]
    assert owner.recovered().buffer.suppressed.ranges() == [(late, late)]


def test_row_u12_only_the_bitmaps_remember_sealed_ids() -> None:
    log = Log()
    log.records(None, 0, 1)
    everyone = [TxnId(0, number) for number in range(1, 2001)]
    for txn in everyone:
        log.record(txn, 1)
    log.mark(marker(*((txn, ABORT, 0) for txn in everyone)))
    owner = folded(log, segment_size=100)
    assert len(owner.segments) == 19
    assert owner.buffer.segments.unsealed_size == 100
    assert len(owner.buffer.aborted) == 2000


def test_seqnos_do_not_depend_on_how_often_a_batch_is_offered() -> None:
    log = Log()
    log.records(None, 0, 4)
    owner, sequencer = folded(log), Sequencer()
    for _ in range(3):
        numbered(log, owner.buffer, sequencer)
        assert sequencer.next_seqno == 5
