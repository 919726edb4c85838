import dataclasses

import pytest
from snapshot_driver import SMALL, Interfering, abort_some, assert_true, entries, keeper, put
from writing import TopicWriter

from broker_io.batch import Batch, Message
from broker_io.errors import Damaged
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from snapshots.entries import EndEntry
from snapshots.envelope import END, PART, SPILL, gone, message
from snapshots.errors import (
    AppliedPositionTrimmed,
    SnapshotDamaged,
    SnapshotMissing,
    UnsupportedSnapshot,
)
from snapshots.keys import SNAPSHOT_TOPIC, end_key, part_key, spill_key
from snapshots.parts import decode_part, encode_part
from snapshots.recovery import read_snapshot, restore
from snapshots.table import HISTORY_KEPT, TopicEntries, scan
from txnbuffer.model import Outcome, TxnId

T = "t"


def stored(topic=T, txns=range(1, 12), **options):
    """A broker with a snapshot of three parts, and the owner that wrote it."""
    broker = MemoryBroker(ledger_entries=9)
    owner = keeper(broker, **options)
    owner.register(topic)
    writer = TopicWriter(broker, topic)
    writer.plain("p")
    abort_some(writer, *txns)
    owner.pump()
    owner.snapshot(topic)
    return broker, owner, writer


def end_of(broker, topic=T):
    return EndEntry.decode(entries(broker, topic).end.value)


def with_end(broker, **changes):
    end = dataclasses.replace(end_of(broker), **changes)
    return message(end_key(T), END, end.epoch, end.encode())


def flipped(value, at):
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


# What does not belong together


def test_row_p12_h13_every_flipped_bit_is_damage_or_changes_nothing():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    good = read_snapshot(T, found)
    for name in ("parts", "spills"):
        for number, entry in getattr(found, name).items():
            for at in range(len(entry.value)):
                wrong = dict(getattr(found, name))
                wrong[number] = entry._replace(value=flipped(entry.value, at))
                with pytest.raises(SnapshotDamaged) as caught:
                    read_snapshot(T, dataclasses.replace(found, **{name: wrong}))
                letter = "s" if name == "spills" else ""
                assert caught.value.entry == f"{T}-{letter}{number}"
    for at in range(len(found.end.value)):
        end = found.end._replace(value=flipped(found.end.value, at))
        with pytest.raises(SnapshotDamaged, match="t-end"):
            read_snapshot(T, dataclasses.replace(found, end=end))
    assert good.buffer.aborted.ids() == read_snapshot(T, found).buffer.aborted.ids()


def test_row_p12_a_torn_entry_is_damage():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    for cut in range(len(found.end.value)):
        with pytest.raises(SnapshotDamaged):
            read_snapshot(T, dataclasses.replace(found, end=found.end._replace(value=found.end.value[:cut])))
    part = found.parts[2]
    for cut in range(len(part.value)):
        with pytest.raises(SnapshotDamaged):
            read_snapshot(T, dataclasses.replace(found, parts=found.parts | {2: part._replace(value=part.value[:cut])}))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_row_p12_a_missing_part_is_named(number):
    broker, _, _ = stored()
    found = entries(broker, T)
    del found.parts[number]
    with pytest.raises(
        SnapshotDamaged, match=f"entry t-{number}: it is missing.*1 to 3.*txnbuf verify.*txnbuf recover t"
    ):
        read_snapshot(T, found)


def test_row_p12_a_missing_spill_is_named():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    number = max(found.spills)
    del found.spills[number]
    with pytest.raises(SnapshotDamaged, match=f"entry t-s{number}: it is missing"):
        read_snapshot(T, found)


def test_row_p12_a_part_of_another_chain_is_damage():
    """The same part of another topic's chain, with a sound digest of its own."""
    broker, _, _ = stored()
    other, _, _ = stored(txns=range(2, 13))
    found = entries(broker, T)
    with pytest.raises(SnapshotDamaged, match="t-2: it does not follow the part before it"):
        read_snapshot(T, dataclasses.replace(found, parts=found.parts | {2: entries(other, T).parts[2]}))


def test_row_p12_a_last_part_of_another_snapshot_is_damage():
    broker, _, _ = stored()
    found = entries(broker, T)
    part = decode_part(T, 3, found.parts[3])
    items = dataclasses.replace(part.part.items, least=part.part.items.least + 50)
    value = encode_part(dataclasses.replace(part, part=dataclasses.replace(part.part, items=items)))
    with pytest.raises(SnapshotDamaged, match="t-end: its chain does not end with the last part"):
        read_snapshot(T, dataclasses.replace(found, parts=found.parts | {3: found.parts[3]._replace(value=value)}))


def test_h13_a_chain_outlives_its_owners():
    broker, owner, writer = stored()
    for start in (20, 30, 40):
        owner = keeper(broker)
        abort_some(writer, *range(start, start + 4))
        owner.pump()
        owner.snapshot(T)
    epochs = [entry.epoch for _, entry in sorted(entries(broker, T).parts.items())]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 4
    assert_true(keeper(broker), broker, T)


@pytest.mark.parametrize(
    ("epochs", "fine"), [((1, 1, 2), True), ((1, 2, 1), False), ((1, 1, 3), False), ((2, 2, 2), True)]
)
def test_h13_epochs_never_fall_along_the_chain_nor_pass_the_end(epochs, fine):
    broker, _, _ = stored()
    found = entries(broker, T)
    before = end_of(broker).chain_first
    for number, epoch in enumerate(epochs, 1):
        part = decode_part(T, number, found.parts[number])
        value = encode_part(dataclasses.replace(part, epoch=epoch, chain_before=before))
        before = value[-16:]
        found.parts[number] = found.parts[number]._replace(value=value, epoch=epoch)
    end = dataclasses.replace(end_of(broker), epoch=2, chain_next=before)
    found.end = found.end._replace(value=end.encode(), epoch=2)
    if fine:
        read_snapshot(T, found)
    else:
        with pytest.raises(SnapshotDamaged, match="epoch"):
            read_snapshot(T, found)


def test_h13_entries_outside_the_range_are_ignored():
    broker, _owner, _ = stored()
    put(broker, message(part_key(T, 4), PART, 1, b"junk"), message(spill_key(T, 9), SPILL, 1, b"junk"))
    successor = keeper(broker)
    assert_true(successor, broker, T)
    successor.snapshot(T)
    assert sorted(entries(broker, T).spills) == []


def test_parts_without_an_end_are_damage():
    broker, _, _ = stored()
    found = entries(broker, T)
    found.end = None
    with pytest.raises(SnapshotDamaged, match="t-end: it is missing, though"):
        read_snapshot(T, found)


def test_nothing_at_all_is_missing():
    with pytest.raises(SnapshotMissing, match="txnbuf verify"):
        read_snapshot(T, TopicEntries())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": "2"}, UnsupportedSnapshot),
        ({"version": ""}, SnapshotDamaged),
        ({"kind": "part"}, SnapshotDamaged),
        ({"epoch": 7}, SnapshotDamaged),
    ],
)
def test_an_end_with_wrong_properties_is_refused(changes, error):
    broker, _, _ = stored()
    found = entries(broker, T)
    found.end = found.end._replace(**changes)
    with pytest.raises(error, match="t-end"):
        read_snapshot(T, found)


def test_an_end_of_another_topic_or_chain_is_refused():
    broker, _, _ = stored()
    found = entries(broker, T)
    for changes, match in (
        ({"topic": "u"}, "of topic u"),
        ({"incarnation": "x"}, "chain does not start"),
        ({"first_part": 2}, "name different parts"),
        ({"next_part": 3}, "name different parts"),
    ):
        end = dataclasses.replace(end_of(broker), **changes)
        wrong = dataclasses.replace(found, end=found.end._replace(value=end.encode()))
        with pytest.raises(SnapshotDamaged, match=match):
            read_snapshot(T, wrong)


# Whose log it is


def test_a_topic_made_anew_inherits_nothing():
    broker, _, _ = stored()
    broker.delete_topic(T)
    TopicWriter(broker, T).plain("new")
    with pytest.raises(SnapshotMissing, match="made anew"):
        restore(broker, scan(broker), T)
    owner = keeper(broker)
    assert owner.topics == []
    assert "made anew" in owner.notes[0]
    assert not entries(broker, T)
    owner.register(T)
    assert_true(owner, broker, T)
    assert owner.buffer(T).aborted.ids() == []


def test_what_is_left_of_a_topic_that_is_gone_is_removed():
    broker, _, _ = stored()
    broker.delete_topic(T)
    owner = keeper(broker)
    assert owner.problems == {}
    assert not entries(broker, T)


def trimmed_to(broker, ledger):
    broker.trim(T, ledger)
    return broker.ledgers(T)[0].ledger


def test_an_applied_position_whose_ledger_is_gone_is_an_error():
    broker, owner, writer = stored()
    writer.plain(*["p"] * 20)
    trimmed_to(broker, 10**6)
    owner = keeper(broker)
    assert isinstance(owner.problems[T], AppliedPositionTrimmed)
    assert "txnbuf recover t --write" in str(owner.problems[T])
    with pytest.raises(AppliedPositionTrimmed):
        owner.buffer(T)


def test_a_ledger_closed_and_wholly_applied_may_go():
    broker, owner, writer = stored()
    broker.roll(T)
    writer.plain("p")
    owner.pump()
    owner.snapshot(T)
    broker.roll(T)
    owner = keeper(broker)
    owner.snapshot(T)
    assert trimmed_to(broker, 10**6) == owner._tails[T].state().following_ledger
    for _ in range(2):  # the proof has to outlive the ledger that it is about
        owner = keeper(broker)
        assert owner.problems == {}
        owner.snapshot(T)
    writer.plain("q")
    owner.pump()
    assert owner.buffer(T).applied == broker.last_position(T)
    assert [txn.least for txn in owner.buffer(T).aborted.ids()] == [10, 11]  # of the part whose end is in no ledger yet


def test_an_empty_log_whose_first_ledger_is_gone_is_an_error():
    broker = MemoryBroker(ledger_entries=3)
    keeper(broker).register(T)
    TopicWriter(broker, T).plain(*"abcdefg")
    trimmed_to(broker, 10**6)
    assert isinstance(keeper(broker).problems[T], AppliedPositionTrimmed)


# Falling back


def test_an_unusable_end_falls_back_to_the_older_one():
    broker, owner, writer = stored()
    first = end_of(broker).snapshot_id
    abort_some(writer, 20, 21)
    owner.pump()
    owner.snapshot(T)
    end = entries(broker, T).end
    put(broker, message(end_key(T), END, 1, flipped(end.value, 30)))
    abort_some(writer, 22)
    successor = keeper(broker)
    assert_true(successor, broker, T)
    assert "t-end" in successor.notes[0]
    assert f"older snapshot {first + 1}" in successor.notes[1]
    successor.snapshot(T)
    assert end_of(broker).snapshot_id > first + 1
    again = keeper(broker)
    assert_true(again, broker, T)
    assert again.notes == []


def test_an_older_end_is_passed_over_if_it_is_unusable_too():
    broker, _owner, _writer = stored()
    second = entries(broker, T).end
    put(broker, *[message(end_key(T), END, 1, flipped(second.value, at)) for at in (30, 31)])
    successor = keeper(broker)
    assert_true(successor, broker, T)
    assert f"older snapshot {end_of_value(second).snapshot_id}" in successor.notes[1]


def end_of_value(stored):
    return EndEntry.decode(stored.value)


def test_parts_that_only_the_older_snapshot_has_are_written_again():
    broker, _owner, _writer = stored()
    put(broker, gone(part_key(T, 2), 1))
    broker.compact(SNAPSHOT_TOPIC)
    rewritten = with_end(broker)
    put(broker, rewritten)
    successor = keeper(broker)
    assert_true(successor, broker, T)
    assert "older snapshot" in successor.notes[1]  # that the raw topic still holds, parts and all
    again = keeper(broker)
    assert_true(again, broker, T)
    assert again.notes == []


def only_damaged(broker):
    """A snapshot topic that holds nothing of the topic but a chain with a hole."""
    found = entries(broker, T)
    broker.delete_topic(SNAPSHOT_TOPIC)
    broker.create_topic(SNAPSHOT_TOPIC)
    parts = [message(part_key(T, n), PART, 1, entry.value) for n, entry in found.parts.items() if n != 2]
    put(broker, *parts, message(end_key(T), END, 1, found.end.value))


def test_a_replay_from_the_start_needs_the_start():
    broker, _, _ = stored()
    only_damaged(broker)
    successor = keeper(broker)
    assert_true(successor, broker, T)
    assert "replayed from the start" in successor.notes[1]

    broker, _owner, _writer = stored()
    only_damaged(broker)
    trimmed_to(broker, broker.ledgers(T)[1].ledger)
    successor = keeper(broker)
    with pytest.raises(SnapshotDamaged, match="t-2: it is missing"):
        successor.buffer(T)


def test_repair_takes_what_the_log_still_holds():
    broker, _owner, _writer = stored()
    only_damaged(broker)
    trimmed_to(broker, broker.ledgers(T)[1].ledger)
    successor = keeper(broker)
    successor.rebuild(T)
    assert successor.problems == {}
    assert_true(successor, broker, T)
    again = keeper(broker)
    assert again.problems == {}
    assert again.buffer(T).aborted.ids() == successor.buffer(T).aborted.ids()


def test_a_newer_format_is_never_fallen_back_from():
    broker, _, _ = stored()
    end = entries(broker, T).end
    newer = message(end_key(T), END, 1, end.value)
    put(broker, newer._replace(properties={**newer.properties, "tb.v": "2"}))
    assert isinstance(keeper(broker).problems[T], UnsupportedSnapshot)


# Counterexamples and rows


def test_h10_recovery_resumes_where_the_state_was_applied():
    """A commit before the snapshot while an older transaction is open is neither late nor lost after it."""
    broker = MemoryBroker()
    owner = keeper(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.records(1, "open")
    writer.records(2, "x")
    writer.commit(2)
    owner.pump()
    owner.snapshot(T)
    successor = keeper(broker)
    assert successor.buffer(T).counters.late == 0
    assert successor.buffer(T).applied == broker.last_position(T)
    assert successor.buffer(T).outcome(TxnId(0, 2)) is Outcome.COMMIT
    assert_true(successor, broker, T)


def test_h1_a_committed_transaction_is_known_after_recovery():
    broker = MemoryBroker()
    owner = keeper(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.records(1, "x")
    writer.commit(1)
    owner.pump()
    owner.snapshot(T)
    writer.records(1, "x", first_seq=1)  # resent behind the marker
    successor = keeper(broker)
    assert successor.buffer(T).outcome(TxnId(0, 1)) is Outcome.COMMIT
    assert successor.buffer(T).counters.late == 1
    assert len(successor.buffer(T).ongoing) == 0
    assert_true(successor, broker, T)


def test_h15_seqnos_are_the_same_after_every_recovery():
    broker = MemoryBroker(ledger_entries=7)
    owner = keeper(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("a", "b")
    writer.records(1, "open")
    for txn in range(2, 9):
        writer.records(txn, "x")
        (writer.commit if txn % 2 else writer.abort)(txn)
        writer.plain("p")
        owner.pump()
        owner.snapshot(T)
        owner = keeper(broker)
        assert owner.sequencer(T).next_seqno == 3
        assert owner.trim(T, 10**6) == broker.ledgers(T)[0].ledger
    assert broker.first_position(T) == Position(broker.ledgers(T)[0].ledger, 0)
    writer.commit(1)
    owner = keeper(broker)
    assert owner.sequencer(T).next_seqno == 3 + 1 + 3 + 7
    assert_true(owner, broker, T)


def test_h15_seqnos_that_can_no_longer_be_told_stop_recovery():
    broker = MemoryBroker(ledger_entries=4)
    owner = keeper(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("a", "b")
    writer.records(1, "open")
    writer.plain(*"cdefgh")
    owner.pump()
    owner.snapshot(T)
    trimmed_to(broker, owner.buffer(T).applied.ledger)  # retention that knows nothing of the floor
    assert isinstance(keeper(broker).problems[T], AppliedPositionTrimmed)


def test_row_p7_topics_with_names_like_keys_stand_side_by_side():
    broker = MemoryBroker(ledger_entries=9)
    owner = keeper(broker, max_entry_bytes=SMALL + 60)
    names = ["a", "a-1", "a-s1", "a-end", "a-partition-1", "a-1-end", "__owner"]
    for step, name in enumerate(names):
        owner.register(name)
        abort_some(TopicWriter(broker, name), *range(1, 6 + step))
    owner.pump()
    for name in names:
        owner.snapshot(name)
    successor = keeper(broker, max_entry_bytes=SMALL + 60)
    assert successor.topics == sorted(names)
    for name in names:
        assert_true(successor, broker, name)
    successor.delete("a")
    for name in names[1:]:
        assert entries(broker, name).end is not None


def test_row_p11_a_compacted_topic_that_ends_in_tombstones_is_read_to_its_end():
    broker, owner, _ = stored()
    owner.register("u")
    owner.delete("u")
    broker.compact(SNAPSHOT_TOPIC)
    between = Interfering(broker)
    table = scan(between)
    assert between.reads <= 3
    assert list(table.topics) == [T]
    assert_true(keeper(broker), broker, T)


def test_row_u4_a_replay_adds_no_abort_twice():
    broker, owner, writer = stored()
    writer.records(50, "open")
    abort_some(writer, 51, 52)
    owner.pump()
    owner.snapshot(T)
    for _ in range(3):
        owner = keeper(broker)
        owner.snapshot(T)
    assert_true(owner, broker, T)
    tail = owner._tails[T].state().buffer.tail
    assert len(set(tail.least.tolist())) == len(tail.least)


def test_row_u6_a_snapshot_after_recovery_has_the_real_positions():
    broker, owner, writer = stored()
    abort_some(writer, 50)
    owner = keeper(broker)
    owner.snapshot(T)
    state = read_snapshot(T, entries(broker, T)).state.buffer
    assert state.max_read == state.applied == broker.last_position(T)


def test_row_u13_one_bad_topic_stops_no_other():
    broker, owner, _ = stored()
    for name in ("bad", "unreadable", "worse"):
        owner.register(name)
        abort_some(TopicWriter(broker, name), 1)
    owner.pump()
    owner.snapshot("bad")
    found = entries(broker, "bad")
    put(broker, *[message(end_key("bad"), END, 1, b"junk")] * HISTORY_KEPT)
    assert found.end is not None
    with broker.writer("worse") as writer:
        writer.append(Batch.of([Message(None, b"junk", {"tb.v": "1", "tb.marker": "1"})])).result()
    TopicWriter(broker, "unreadable").plain("p")
    broker.faults.fail_read(Damaged("file", 3, "bit rot"), topic="unreadable")
    successor = keeper(broker)
    assert sorted(successor.problems) == ["bad", "unreadable", "worse"]
    assert_true(successor, broker, T)
    for name, match in (("bad", "bad-end"), ("unreadable", "bit rot"), ("worse", "topic worse stopped")):
        with pytest.raises(Exception, match=match):
            successor.buffer(name)
        with pytest.raises(Exception, match=match):
            successor.register(name)
    abort_some(TopicWriter(broker, T), 77)
    successor.pump()
    successor.snapshot(T)
    assert_true(successor, broker, T)
