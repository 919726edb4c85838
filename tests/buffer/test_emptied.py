"""Records that compaction has emptied: a log with them says of transactions and seqnos what it said before."""

from __future__ import annotations

import numpy as np
import pytest
from buffer.buffer_driver import Owner, folded, numbered
from histories import History, Log, cuts, histories, marker, place, record, segment_sizes
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Message
from broker_io.compaction import RecordRetention
from broker_io.position import Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility, Sequencer, decided_rows, visible_counts
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import RECORDS, REMOVED, RESERVED, removed_rows

TXN = TxnId(0, 1)


def decided(log: Log, buffer: TransactionBuffer) -> int:
    return sum(decided_rows(placed, buffer) for placed in log.batches())


def emptied(log: Log, buffer: TransactionBuffer, chosen: set[int]) -> Log:
    """The log whose chosen messages, of those that compaction may empty, are empty."""
    rules = TransactionRules(PinnedVisibility.of(buffer))
    messages: list[Message] = []
    left = decided(log, buffer)
    for placed in log.batches(0, left):
        retentions = rules.retentions(placed)
        rows = np.arange(len(messages), len(messages) + len(placed))
        which = np.isin(rows, [*chosen]) & (
            (retentions == RecordRetention.LATEST) | (retentions == RecordRetention.EMPTY)
        )
        messages += rules.emptied(placed.messages, which)
    return Log(log.events, [*messages, *log.messages[left:]])


@given(histories(), segment_sizes, cuts, cuts, st.sets(st.integers(0, 60)))
def test_a_replay_of_emptied_records_gives_the_same_state_and_seqnos(
    history: History, segment_size: int, cut: list[int], other_cut: list[int], chosen: set[int]
) -> None:
    before, after = Owner(segment_size), Owner(segment_size)
    before.apply(history.log, sizes=cut)
    log = emptied(history.log, before.buffer, chosen)
    after.apply(log, sizes=other_cut)
    assert after.buffer.snapshot_state().differences(before.buffer.snapshot_state()) == []
    assert after.buffer.suppressed.ranges() == before.buffer.suppressed.ranges()
    numbers, same = Sequencer(), Sequencer()
    numbered(history.log, before.buffer, numbers)
    numbered(log, after.buffer, same)
    assert (same.next_seqno, same.first_seqnos) == (numbers.next_seqno, numbers.first_seqnos)


@given(histories(), st.sets(st.integers(0, 60)))
def test_hidden_records_go_and_what_has_no_key_stays(history: History, chosen: set[int]) -> None:
    log, buffer = history.log, folded(history.log).buffer
    rules = TransactionRules(PinnedVisibility.of(buffer))
    for placed in emptied(log, buffer, chosen).batches(0, decided(log, buffer)):
        counts = visible_counts(placed, buffer).tolist()
        rows = zip(rules.retentions(placed).tolist(), counts, placed.positions, placed.messages, strict=True)
        for retention, count, position, message in rows:
            event = next(event for event in log.events if event.position == position)
            if event.marker is not None or REMOVED in message.properties:
                assert retention == RecordRetention.RETAIN
            elif not count:
                assert retention == RecordRetention.EMPTY
            elif event.size is not None:
                assert retention == RecordRetention.RECORD_SET
            else:
                assert retention == (RecordRetention.RETAIN if message.key is None else RecordRetention.LATEST)


def test_an_undecided_message_is_refused() -> None:
    log = Log()
    log.record(None)
    log.record(TXN, 1)
    rules = TransactionRules(PinnedVisibility.of(folded(log).buffer))
    with pytest.raises(InvalidRequest, match=r"is not decided yet"):
        rules.retentions(place(log.messages, [event.position for event in log.events]))


def test_an_emptied_record_keeps_only_the_properties_of_the_protocol() -> None:
    log = Log()
    log.end(TXN, Outcome.ABORT)
    rules = TransactionRules(PinnedVisibility.of(folded(log).buffer))
    rows = [
        Message(b"k", b"v", {"a": "x", "n": "17"}, 7),
        record(TXN, 3)._replace(properties={**record(TXN, 3).properties, "a": "y", "n": "18"}),
        record(TXN, 4, size=5),
        Message(b"stays", b"v", {"a": "z", "n": "19"}, 8),
    ]
    batch = place(rows, [Position(1, entry) for entry in range(4)]).messages
    found = [*rules.emptied(batch, np.array([True, True, True, False]))]
    assert found[3] == rows[3]
    for row, before in zip(found[:3], rows[:3], strict=True):
        own = {name: text for name, text in before.properties.items() if name.startswith(RESERVED)}
        assert row == Message(None, None, {**own, REMOVED: "1"}, 0)
    again = [
        *rules.emptied(
            rules.emptied(batch, np.array([True, False, False, False])), np.array([False, True, True, False])
        )
    ]
    assert again == found, "what was emptied before stays so"
    assert found[2].properties[RECORDS] == "5"
    removed = removed_rows(rules.emptied(batch, np.array([True, True, True, False])))
    assert removed is not None
    assert removed.tolist() == [True, True, True, False]
    assert removed_rows(batch) is None


def test_a_marker_stays() -> None:
    log = Log()
    log.mark(marker((TXN, Outcome.COMMIT, 0)))
    rules = TransactionRules(PinnedVisibility.of(folded(log).buffer))
    assert rules.retentions(place(log.messages, [log.events[0].position])).tolist() == [RecordRetention.RETAIN]
