"""Histories of one topic that break the protocol if it lacks one of its rules."""

from __future__ import annotations

import pytest
from buffer.buffer_driver import Owner, folded, numbered, visible
from histories import Log, marker

from broker_io.position import Position
from txnbuffer.buffer.state import EpochRaised, Ignored, TransactionEnded, Void
from txnbuffer.buffer.visibility import Sequencer, reader_floor
from txnbuffer.model import Outcome, TxnId

X, Y = TxnId(0, 5), TxnId(0, 3)
ABORT, COMMIT = Outcome


def part_of(log: Log, stop: int) -> Log:
    return Log(log.events[:stop], log.messages[:stop])


@pytest.mark.parametrize("outcome", Outcome)
def test_h1_ended_ids_survive_a_snapshot(outcome: Outcome) -> None:
    log = Log()
    first = log.record(X, 1)
    log.end(X, outcome, 1)
    again = log.record(X, 1)
    log.end(X, ABORT)
    owner = folded(part_of(log, 2)).recovered()
    assert owner.buffer.outcome(X) is outcome
    owner.apply(log, 2)
    assert owner.buffer.max_read_position == log.events[-1].position
    assert visible(log, owner.buffer) == ([first] if outcome is COMMIT else [])
    assert owner.buffer.suppressed.ranges() == [(again, again)]


def test_h1_trimming_leaves_the_ended_ids() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, ABORT)
    log.record(Y, 1)
    log.end(Y, ABORT)
    log.new_ledger()
    late = log.record(X, 1)
    owner = Owner(segment_size=1)
    owner.apply(log, 0, 4)
    owner.trim(2)
    assert not owner.buffer.is_aborted(X)
    owner = owner.recovered()
    owner.apply(log, 4)
    assert owner.buffer.counters.late == 1
    assert owner.buffer.max_read_position == late
    assert visible(log, owner.buffer, 4) == []


def test_h2_what_was_seen_of_an_ongoing_transaction_survives_a_snapshot() -> None:
    log = Log()
    first = log.record(X, 1)
    log.record(X, 1)
    log.end(X, COMMIT, 1)
    owner = folded(part_of(log, 1)).recovered()
    owner.apply(log, 1)
    assert visible(log, owner.buffer) == [first]
    assert owner.buffer.counters.duplicates == 1
    assert owner.buffer.counters.damaged == 0


def test_h2_the_number_accepted_survives_a_snapshot() -> None:
    log = Log()
    log.records(X, 1, 3)
    log.record(X, 4)
    log.end(X, COMMIT, 4)
    owner = folded(part_of(log, 3)).recovered()
    (entry,) = owner.buffer.ongoing.values()
    assert (entry.highest, entry.accepted, entry.first, entry.before) == (3, 3, Position(1, 0), None)
    owner.apply(log, 3)
    assert owner.buffer.counters.damaged == 0


def test_h3_a_later_marker_after_its_transaction_was_forgotten() -> None:
    log = Log()
    first = log.record(X, 1)
    log.end(X, COMMIT, 1)
    log.mark(marker(lwm=5))
    log.end(X, ABORT)
    owner = folded(log)
    assert owner.buffer.outcome(X) is None
    assert not owner.buffer.is_aborted(X)
    assert visible(log, owner.buffer) == [first]
    assert owner.effects[-1] == Ignored(X, ABORT, log.events[-1].position)


def test_h3_a_marker_at_or_below_the_low_water_mark_still_ends_an_ongoing_transaction() -> None:
    log = Log()
    log.record(X, 1)
    log.mark(marker(lwm=5))
    owner = folded(log)
    assert owner.buffer.max_read_position is None
    log.end(X, ABORT)
    owner.apply(log, 2)
    assert owner.buffer.is_aborted(X)
    assert owner.buffer.max_read_position == log.events[-1].position


def test_h3_an_abort_that_finds_no_record_enters_the_ended_set_only() -> None:
    log = Log()
    log.end(X, ABORT)
    late = log.record(X, 1)
    owner = folded(log)
    assert owner.buffer.outcome(X) is ABORT
    assert not owner.buffer.is_aborted(X)
    assert len(owner.buffer.snapshot_state().unsealed.least) == 0
    assert owner.buffer.suppressed.ranges() == [(late, late)]


def test_h4_a_zombies_one_phase_marker_is_void_after_the_epoch_marker() -> None:
    log = Log()
    log.record(X, 1)
    epoch_marker = log.mark(marker(epoch=2))
    void = log.end(X, COMMIT, 1, epoch=1, decided=False)
    log.end(X, ABORT, epoch=2)
    owner = folded(log)
    assert EpochRaised(0, 2, epoch_marker) in owner.effects
    assert Void(X, COMMIT, void, 1, 2) in owner.effects
    assert visible(log, owner.buffer) == []
    assert owner.buffer.counters.void == 1


def test_h4_the_newest_epoch_survives_a_snapshot() -> None:
    log = Log()
    log.record(X, 1)
    log.mark(marker(epoch=2))
    log.end(X, COMMIT, 1, epoch=1, decided=False)
    owner = folded(part_of(log, 2)).recovered()
    owner.apply(log, 2)
    assert owner.buffer.counters.void == 1
    assert owner.buffer.outcome(X) is None


def test_h4_a_decided_marker_holds_whatever_its_epoch() -> None:
    log = Log()
    first = log.record(X, 1)
    log.mark(marker(epoch=2))
    log.end(X, COMMIT, 1, epoch=1, decided=True)
    assert visible(log, folded(log).buffer) == [first]


@pytest.mark.parametrize("zombie", [0, 1, 8])
def test_h4_a_one_phase_marker_is_void_however_old_its_epoch(zombie: int) -> None:
    log = Log()
    log.record(X, 1)
    log.mark(marker(epoch=9))
    log.end(X, COMMIT, 1, epoch=zombie, decided=False)
    owner = folded(log)
    assert X in owner.buffer.ongoing
    assert owner.buffer.counters.void == 1


def test_h4_epochs_are_compared_within_one_coordinator() -> None:
    log = Log()
    first = log.record(X, 1)
    log.mark(marker(epoch=9, coordinator=1))
    log.end(X, COMMIT, 1, epoch=1, decided=False)
    assert visible(log, folded(log).buffer) == [first]


def test_h10_resuming_at_the_applied_position_applies_nothing_twice() -> None:
    log = Log()
    y = log.record(Y, 1)
    x = log.record(X, 1)
    log.end(X, COMMIT, 1, lwm=0)
    log.record(TxnId(0, 7), 1)
    log.end(TxnId(0, 7), ABORT)
    owner = folded(log)
    owner = owner.recovered()
    assert owner.buffer.max_read_position is None
    assert owner.buffer.applied == log.events[-1].position
    log.end(Y, COMMIT, 1)
    owner.apply(log, 5)
    assert visible(log, owner.buffer) == [y, x]
    assert owner.buffer.counters.late == 0
    state = owner.buffer.snapshot_state()
    assert (state.unsealed.least.tolist(), len(state.unsealed.firsts)) == ([7], 0)


def test_h15_seqnos_between_max_read_and_applied_are_not_lost_by_a_recovery() -> None:
    log = Log()
    log.records(None, 0, 2)
    log.record(Y, 1)
    log.records(None, 0, 3)
    owner, sequencer = folded(log), Sequencer()
    numbered(log, owner.buffer, sequencer)
    assert sequencer.next_seqno == 3
    assert sequencer.position == owner.buffer.max_read_position == Position(1, 1)
    assert owner.buffer.applied == Position(1, 5)
    owner, sequencer = owner.recovered(), Sequencer.restore(sequencer.snapshot_state())
    log.end(Y, COMMIT, 1)
    log.record(None)
    owner.apply(log, 6)
    numbered(log, owner.buffer, sequencer, 2)
    assert sequencer.next_seqno == 8


def test_h16_each_existing_ledger_has_the_seqno_of_its_first_visible_record() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, ABORT)
    log.records(None, 0, 2)
    log.new_ledger()
    log.record(TxnId(0, 9), 1)
    log.end(TxnId(0, 9), ABORT)
    log.new_ledger(3)
    log.records(None, 0, 2)
    owner, sequencer = folded(log), Sequencer()
    numbered(log, owner.buffer, sequencer)
    assert sequencer.first_seqnos == {1: 1, 2: 3, 5: 3}
    sequencer = Sequencer.restore(sequencer.snapshot_state())
    sequencer.trim(2)
    assert sequencer.first_seqnos == {2: 3, 5: 3}


def test_h17_a_reader_trims_only_below_its_own_next_record() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, ABORT)
    log.record(Y, 1)
    log.end(Y, ABORT)
    log.new_ledger()
    log.record(None)
    owner = Owner(segment_size=1)
    owner.apply(log)
    fetched = log.events[0].position
    owner.trim(reader_floor(2, fetched))
    assert visible(log, owner.buffer) == [log.events[-1].position]
    owner.trim(reader_floor(2, log.events[-1].position))
    assert not owner.buffer.is_aborted(X)
    assert reader_floor(2, None) == 2


def test_an_id_twice_in_one_marker_is_decided_by_the_first_item() -> None:
    log = Log()
    first = log.record(X, 1)
    place = log.mark(marker((X, COMMIT, 1), (X, ABORT, 0), (Y, ABORT, 0), (Y, COMMIT, 0)))
    owner = folded(log)
    assert visible(log, owner.buffer) == [first]
    ends = [effect for effect in owner.effects if isinstance(effect, TransactionEnded)]
    assert [(effect.txn, effect.outcome) for effect in ends] == [(X, COMMIT), (Y, ABORT)]
    assert owner.effects.count(Ignored(X, ABORT, place)) == owner.effects.count(Ignored(Y, COMMIT, place)) == 1


def test_rule_5_the_items_of_a_marker_count_before_its_low_water_mark_and_epoch() -> None:
    log = Log()
    log.end(X, COMMIT, 0, lwm=5)
    owner = folded(log)
    assert [effect for effect in owner.effects if isinstance(effect, TransactionEnded)] != []
    one = Log()
    one.record(X, 1)
    one.end(X, COMMIT, 1, epoch=1, decided=False)
    assert folded(one).buffer.outcome(X) is COMMIT


def test_a_void_marker_still_raises_the_low_water_mark() -> None:
    log = Log()
    log.mark(marker(epoch=2))
    log.end(X, COMMIT, 0, epoch=1, decided=False, lwm=4)
    owner = folded(log)
    assert owner.buffer.coordinators[0].low_water_mark == 4
    assert owner.buffer.outcome(X) is None
