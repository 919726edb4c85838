"""The rows of the conformance checklist about the buffer itself; `tests/CHECKLIST.md` lists where the others are."""

from __future__ import annotations

import pytest
from buffer.buffer_driver import Owner, folded, visible
from histories import Log, marker

from broker_io.position import Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import Reason, Suppressed, TransactionEnded
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.model import Outcome, TxnId

ABORT, COMMIT = Outcome
X, Y, Z = TxnId(0, 1), TxnId(0, 2), TxnId(0, 3)


@pytest.mark.parametrize("end", Outcome)
def test_row_01_interleaved_transactions_recover_to_the_exact_visible_set(end: Outcome) -> None:
    log = Log()
    x = [log.record(X, seq) for seq in (1,)]
    y = [log.record(Y, 1)]
    x.append(log.record(X, 2))
    y.append(log.record(Y, 2))
    log.end(X, COMMIT, 2)
    owner = folded(log).recovered()
    assert visible(log, owner.buffer) == x[:1]
    log.end(Y, end, 2)
    owner.apply(log, 5)
    assert visible(log, owner.buffer) == sorted(x + (y if end is COMMIT else []))


def test_row_02_the_state_carries_the_marker_as_max_read_and_the_aborts() -> None:
    log = Log()
    log.record(X, 1)
    place = log.end(X, ABORT)
    state = folded(log).buffer.snapshot_state()
    assert state.max_read == state.applied == place
    assert [*zip(state.unsealed.most.tolist(), state.unsealed.least.tolist(), strict=True)] == [X]
    assert [*state.unsealed.markers] == [place]


def test_row_03_a_removed_ledgers_abort_is_trimmed_and_the_newer_is_kept() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, ABORT)
    log.new_ledger()
    log.record(Y, 1)
    log.end(Y, ABORT)
    log.record(Z, 1)
    log.end(Z, ABORT)
    owner = folded(log, segment_size=1)
    owner.trim(2)
    assert owner.buffer.aborted.ids() == [Y, Z]
    assert owner.recovered().buffer.aborted.ids() == [Y, Z]


def test_row_07_fourteen_aborts_in_segments_of_five() -> None:
    log = Log()
    for least in range(1, 15):
        log.record(TxnId(0, least), 1)
        log.end(TxnId(0, least), ABORT)
        if least == 10:
            log.new_ledger()
    owner = folded(log, segment_size=5)
    assert [len(part.items) for part in owner.segments.values()] == [5, 5]
    assert owner.buffer.segments.unsealed_size == 4
    other = owner.recovered()
    assert other.buffer.snapshot_state().differences(owner.buffer.snapshot_state()) == []
    assert other.buffer.aborted.ids() == owner.buffer.aborted.ids()
    other.trim(2)
    assert other.buffer.aborted.ids() == [TxnId(0, least) for least in range(11, 15)]


@pytest.mark.parametrize("published", [True, False])
def test_row_12_max_read_covers_what_was_published_while_a_replay_was_under_way(published: bool) -> None:
    log = Log()
    log.records(None, 0, 2)
    owner = folded(log).recovered()
    owner.buffer.replay_until(log.events[-1].position)
    if published:
        log.record(None)
        owner.apply(log, 2)
    assert owner.buffer.max_read_position == log.events[-1].position


def test_row_13_max_read_stays_when_nothing_was_published_while_a_replay_was_under_way() -> None:
    log = Log()
    log.record(None)
    log.record(X, 1)
    owner = folded(log)
    before = owner.buffer.max_read_position
    owner = owner.recovered()
    owner.buffer.replay_until(log.events[-1].position)
    assert owner.buffer.max_read_position == before == Position(1, 0)


@pytest.mark.parametrize("outcome", Outcome)
def test_row_17_nothing_beyond_the_first_open_transaction_then_in_order_or_skipped(outcome: Outcome) -> None:
    log = Log()
    before = log.record(None)
    x = log.records(X, 1, 2)
    plain = log.record(None)
    y = log.record(Y, 1)
    log.end(Y, COMMIT, 1)
    owner = folded(log)
    assert visible(log, owner.buffer) == [before]
    log.end(X, outcome, 2)
    owner.apply(log, 6)
    assert visible(log, owner.buffer) == [before, *(x if outcome is COMMIT else []), plain, y]


def test_row_18_a_late_record_is_never_visible_and_the_committed_one_stays() -> None:
    log = Log()
    m1 = log.record(X, 1)
    log.end(X, COMMIT, 1, lwm=1)
    m2 = log.record(X, 2)
    owner = folded(log)
    assert visible(log, owner.buffer) == [m1]
    assert owner.effects[-1] == Suppressed(Reason.LATE, X, m2, m2, 1)
    assert owner.buffer.max_read_position == m2


@pytest.mark.parametrize("by", ["marker", "low-water mark"])
def test_row_19_a_record_of_an_ended_transaction_is_refused_by_the_log(by: str) -> None:
    log = Log()
    log.mark(marker(lwm=1) if by == "low-water mark" else marker((X, COMMIT, 0)))
    late = log.record(X, 1)
    owner = folded(log)
    assert owner.buffer.has_ended(X)
    assert len(owner.buffer.ongoing) == 0
    assert owner.buffer.suppressed.ranges() == [(late, late)]


@pytest.mark.parametrize("outcome", Outcome)
def test_row_20_a_marker_ends_the_transaction_on_the_topic(outcome: Outcome) -> None:
    log = Log()
    log.records(X, 1, 2)
    place = log.end(X, outcome, 2)
    assert TransactionEnded(X, outcome, place, True, 2) in folded(log).effects


def test_row_25_max_read_walk_over_ordinary_messages() -> None:
    log, owner = Log(), Owner()
    assert owner.buffer.max_read_position is None
    seen = []
    steps = [lambda: log.record(None), lambda: log.record(X, 1), lambda: log.record(None), lambda: log.end(X, ABORT)]
    for step in steps:
        step()
        owner.apply(log, len(log.events) - 1)
        seen.append(owner.buffer.max_read_position)
    assert [place and place.entry for place in seen] == [0, 0, 0, 3]


def test_row_30_an_open_transaction_pins_max_read() -> None:
    log = Log()
    log.record(None)
    log.record(X, 1)
    log.records(None, 0, 5)
    assert folded(log).buffer.max_read_position == Position(1, 0)


def test_row_31_the_lowest_first_position_of_several_pins() -> None:
    log = Log()
    log.record(None)
    for txn in (Z, X, Y):
        log.record(txn, 1)
    log.end(X, COMMIT, 1)
    owner = folded(log)
    assert owner.buffer.max_read_position == Position(1, 0)
    log.end(Z, COMMIT, 1)
    owner.apply(log, 5)
    assert owner.buffer.max_read_position == Position(1, 2)


def test_row_32_a_commit_lets_max_read_advance() -> None:
    log = Log()
    log.record(X, 1)
    place = log.end(X, COMMIT, 1)
    owner = folded(log)
    assert owner.buffer.max_read_position == place
    assert X not in owner.buffer.ongoing


def test_row_33_an_abort_makes_the_transaction_aborted() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, ABORT)
    assert folded(log).buffer.is_aborted(X)


@pytest.mark.parametrize("end", Outcome)
def test_row_34_an_append_to_an_ended_transaction_is_late(end: Outcome) -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, end, 1)
    log.record(X, 2)
    owner = folded(log)
    assert owner.buffer.counters.late == 1
    assert owner.buffer.max_read_position == log.events[-1].position


def test_row_35_an_unknown_transaction_is_not_aborted() -> None:
    buffer = TransactionBuffer()
    assert not buffer.is_aborted(X)
    assert buffer.outcome(X) is None
    assert not buffer.has_ended(X)


def test_row_36_what_committed_is_visible_after_a_restart() -> None:
    log = Log()
    places = log.records(X, 1, 3)
    log.end(X, COMMIT, 3)
    assert visible(log, folded(log).recovered().buffer) == places


def test_row_37_what_aborted_is_filtered_after_a_restart() -> None:
    log = Log()
    log.records(X, 1, 3)
    log.end(X, ABORT)
    assert visible(log, folded(log).recovered().buffer) == []


def test_row_38_a_transaction_found_open_by_a_recovery_pins() -> None:
    log = Log()
    log.record(None)
    log.record(X, 1)
    owner = Owner().recovered()
    owner.apply(log)
    owner = owner.recovered()
    assert owner.buffer.max_read_position == Position(1, 0)
    log.record(None)
    owner.apply(log, 2)
    assert owner.buffer.max_read_position == Position(1, 0)


def test_row_39_aborts_found_by_a_recovery_filter_at_once() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, ABORT)
    log.record(None)
    owner = Owner().recovered()
    owner.buffer.replay_until(log.events[-1].position)
    owner.apply(log)
    assert visible(log, owner.buffer) == [log.events[-1].position]


def test_row_51_max_read_is_right_once_the_replay_is_done() -> None:
    log = Log()
    log.record(X, 1)
    log.end(X, COMMIT, 1)
    buffer = TransactionBuffer()
    buffer.replay_until(log.events[-1].position)
    assert buffer.max_read_position is None
    buffer.apply_batch(next(log.batches()))
    assert buffer.max_read_position == log.events[-1].position


def test_row_52_an_open_transaction_at_the_head_of_a_ledger_pins_in_the_ledger_before() -> None:
    log = Log()
    last = log.record(None)
    log.new_ledger(4)
    log.record(X, 1)
    owner, sequencer = folded(log), Sequencer()
    assert owner.buffer.max_read_position == last
    assert owner.recovered().buffer.max_read_position == last
    for placed in log.batches():
        sequencer.advance(placed, owner.buffer)
    assert sequencer.position == last


@pytest.mark.parametrize("outcome", Outcome)
def test_row_60_markers_are_never_visible(outcome: Outcome) -> None:
    log = Log()
    log.mark(marker())
    log.end(X, outcome)
    log.mark(marker(lwm=9))
    assert visible(log, folded(log).buffer) == []
