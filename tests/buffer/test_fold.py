"""The invariants of the transaction buffer, on histories in which the rare interleavings are frequent."""

from __future__ import annotations

import pytest
from buffer.buffer_driver import Owner, folded, numbered, visible
from buffer.naive import Naive, end_of
from histories import History, Log, cuts, histories, segment_sizes
from hypothesis import assume, given
from hypothesis import strategies as st

from broker_io.errors import StorageError
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import Damage, Ignored, Reason, Suppressed, TransactionEnded, Void
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.errors import OutOfOrder, SegmentMismatch
from txnbuffer.model import Outcome, TxnId


def existing(history: History, owner: Owner) -> int:
    """Index of the first message whose ledger no trim has dropped."""
    events = history.log.events
    return sum(event.position.ledger < owner.buffer.first_ledger for event in events)


@given(histories(), segment_sizes, cuts, cuts, st.data())
def test_i1_restored_and_replayed_equals_all(history, segment_size, cut, other_cut, data) -> None:
    everything = Owner(segment_size)
    everything.run(history, sizes=cut)
    first = Owner(segment_size)
    stop = data.draw(st.integers(0, len(history.log.events)))
    first.run(history, 0, stop, other_cut)
    second = first.recovered()
    assert second.buffer.snapshot_state().differences(first.buffer.snapshot_state()) == []
    second.run(history, stop, None, other_cut)
    assert second.buffer.snapshot_state().differences(everything.buffer.snapshot_state()) == []
    assert second.buffer.aborted.ids() == everything.buffer.aborted.ids()
    assert second.buffer.suppressed.ranges() == everything.buffer.suppressed.ranges()
    assert [part.summary for part in second.segments.values()] == [
        part.summary for part in everything.segments.values()
    ]


@given(histories(), segment_sizes, cuts, st.data())
def test_i2_what_is_visible_is_what_committed(history, segment_size, cut, data) -> None:
    owner = Owner(segment_size)
    owner.run(history, sizes=cut)
    naive = Naive(history.log.events)
    begin = existing(history, owner)
    start = data.draw(st.integers(begin, len(history.log.events)))
    expected = naive.visible()
    if start < len(history.log.events):
        expected = [place for place in expected if place >= history.log.events[start].position]
    else:
        expected = []
    assert visible(history.log, owner.buffer, start, cut) == expected


@given(histories(), segment_sizes, cuts, st.data())
def test_i2_at_every_point_and_after_a_recovery(history, segment_size, cut, data) -> None:
    stop = data.draw(st.integers(0, len(history.log.events)))
    owner = Owner(segment_size)
    owner.run(history, 0, stop, cut)
    owner = owner.recovered()
    log = Log(history.log.events[:stop], history.log.messages[:stop])
    begin = existing(history, owner)
    places = [event.position.ledger for event in log.events]
    expected = [place for place in Naive(log.events).visible() if place.ledger >= owner.buffer.first_ledger]
    assert begin >= sum(ledger < owner.buffer.first_ledger for ledger in places)
    if begin < stop:
        assert visible(log, owner.buffer, begin, cut) == expected


@given(histories(), cuts)
def test_counters_effects_and_ends_are_those_of_the_definition(history, cut) -> None:
    owner = Owner()
    owner.apply(history.log, sizes=cut)
    naive, counters = Naive(history.log.events), owner.buffer.counters
    assert counters.late == len(naive.late)
    assert counters.duplicates == len(naive.duplicates)
    assert counters.undecodable == len(naive.undecodable)
    assert counters.void == len(naive.void)
    assert counters.damaged == len(naive.damage)
    of = {
        kind: [effect for effect in owner.effects if isinstance(effect, kind)]
        for kind in (TransactionEnded, Void, Damage)
    }
    assert [(effect.txn, effect.outcome) for effect in of[TransactionEnded]] == [
        (txn, end) for _, txn, end in naive.ends
    ]
    assert [effect.txn for effect in of[Void]] == [txn for _, txn in naive.void]
    assert [(effect.txn, effect.expected, effect.accepted) for effect in of[Damage]] == naive.damage
    assert owner.buffer.damage == of[Damage]
    hidden = [effect for effect in owner.effects if isinstance(effect, Suppressed)]
    sizes = {reason: sum(effect.size for effect in hidden if effect.reason is reason) for reason in Reason}
    assert sizes == dict(zip(Reason, counters[:3], strict=True))
    assert set(owner.buffer.aborted.ids()) == naive.aborted_ids()
    open_ids = {txn for _, txn in naive.undecided()}
    assert {*owner.buffer.ongoing} == open_ids
    for txn in {event.txn for event in history.log.events if event.txn}:
        assert owner.buffer.has_ended(txn) == naive.has_ended(txn, len(naive.events))
        if txn.least > naive.low_water_mark(txn.most, len(naive.events)):
            assert owner.buffer.outcome(txn) == naive.outcome(txn)


@given(histories(), cuts)
def test_i3_max_read_position_is_the_definitions_and_never_moves_back(history, cut) -> None:
    buffer, log = TransactionBuffer(), history.log
    at, newest = 0, None
    for placed in log.batches(0, None, cut):
        buffer.apply_batch(placed)
        at += len(placed)
        position = buffer.max_read_position
        assert position == Naive(log.events[:at]).max_read()
        assert newest is None or (position is not None and position >= newest)
        newest = position
        assert buffer.applied == end_of(log.events[at - 1])


@given(histories(), cuts, cuts, st.data())
def test_i3_seqnos_are_dense_and_the_same_after_every_recovery(history, cut, other_cut, data) -> None:
    log = history.log
    places = Naive(log.events).visible()
    owner, sequencer = Owner(), Sequencer()
    at = 0
    crash = data.draw(st.integers(0, len(log.events)))
    for placed in log.batches(0, crash, cut):
        owner.buffer.apply_batch(placed)
        at += len(placed)
        numbered(Log(log.events[:at], log.messages[:at]), owner.buffer, sequencer, 0, other_cut)
    owner, sequencer = owner.recovered(), Sequencer.restore(sequencer.snapshot_state())
    owner.apply(log, crash, None, cut)
    behind = 0
    if sequencer.position is not None:
        behind = sum(event.position <= sequencer.position for event in log.events)
    for placed in log.batches(behind, None, cut):
        step = sequencer.advance(placed, owner.buffer)
        if step.start < step.stop:
            assert step.first_seqno == 1 + sum(place < placed.positions[step.start] for place in places)
    assert sequencer.next_seqno == len(places) + 1
    limit = owner.buffer.max_read_position
    for ledger in {event.position.ledger for event in log.events if limit is not None and event.position <= limit}:
        assert sequencer.first_seqnos[ledger] == 1 + sum(place.ledger < ledger for place in places)


@given(histories(max_steps=12), st.data())
def test_i4_nothing_is_visible_while_a_replay_is_under_way(history, data) -> None:
    log = history.log
    stop = data.draw(st.integers(0, len(log.events)))
    owner = folded(Log(log.events[:stop], log.messages[:stop])).recovered()
    assume(log.events)
    end = end_of(log.events[-1])
    owner.buffer.replay_until(end)
    for index in range(stop, len(log.events)):
        assert owner.buffer.replaying
        assert owner.buffer.max_read_position is None
        assert visible(log, owner.buffer) == []
        owner.apply(log, index, index + 1)
    assert not owner.buffer.replaying
    assert visible(log, owner.buffer) == Naive(log.events).visible()


@given(histories(), cuts, cuts, segment_sizes)
def test_how_the_log_is_cut_into_batches_does_not_matter(history, cut, other_cut, segment_size) -> None:
    one, other = Owner(segment_size), Owner(segment_size)
    one.run(history, sizes=cut)
    other.run(history, sizes=other_cut)
    assert one.buffer.snapshot_state().differences(other.buffer.snapshot_state()) == []
    assert [part.summary for part in one.segments.values()] == [part.summary for part in other.segments.values()]


def test_a_restore_refuses_missing_foreign_and_surplus_segments() -> None:
    log = Log()
    for least in range(1, 8):
        log.record(TxnId(0, least), 1)
        log.end(TxnId(0, least), Outcome.ABORT)
    owner = folded(log, segment_size=2)
    state, parts = owner.buffer.snapshot_state(), [*owner.segments.values()]
    assert [part.number for part in parts] == [1, 2, 3]
    TransactionBuffer.restore(state, parts)
    for wrong in (parts[:-1], parts[1:], [*parts, parts[-1]], [parts[1], parts[0], parts[2]], []):
        with pytest.raises(SegmentMismatch) as caught:
            TransactionBuffer.restore(state, wrong)
        assert isinstance(caught.value, StorageError)


def test_messages_at_or_below_the_applied_position_are_refused() -> None:
    log = Log()
    log.records(None, 0, 5)
    buffer = folded(log).buffer
    (again,) = log.batches(4)
    with pytest.raises(OutOfOrder) as caught:
        buffer.apply_batch(again)
    assert caught.value.position == again.positions.first
    assert buffer.applied == again.positions.last


def test_an_item_that_says_nothing_new_is_reported_as_ignored() -> None:
    log, txn = Log(), TxnId(0, 1)
    log.record(txn, 1)
    log.end(txn, Outcome.COMMIT, 1)
    place = log.end(txn, Outcome.ABORT)
    assert folded(log).effects[-1] == Ignored(txn, Outcome.ABORT, place)
