"""The rows of the manager's conformance checklist, by number; CHECKLIST.md says why a row has no test here."""

from __future__ import annotations

import pytest
from naive_mutations import Reader, Stage, check_chain

from txnbuffer.errors import InvalidRequest, SeqnoGap
from txnbuffer.mutations import MemoryBudget, ReadLog, StopReading


def behind(stage: Stage, text: str = "z=0") -> Reader:
    """A slow cursor in a snapshot of its own, so that what is queued later stays in memory."""
    reader = stage.reader("slow", stage.topic.high)
    stage.queue(text)
    stage.manager.persist()
    return reader


def large(stage: Stage, key: str, size: int = 4_000) -> None:
    stage.manager.queue_many(stage.topic.add([(key.encode(), b"x" * size)]))
    check_chain(stage.manager)


def test_row_1_one_open_snapshot() -> None:
    stage = Stage("z=0")
    counts = []
    for text in ("k1=1", "k1=2", "k2=3"):
        stage.queue(text)
        counts.append(stage.manager.statistics().items - 1)
    assert counts == [1, 1, 2]
    assert stage.ranges()[-1] == (2, 4)


def test_row_2_a_deletion_is_one_mutation() -> None:
    stage = Stage("z=0 k=1 k-")
    (one,) = stage.manager.register("c", 0).take(9)
    assert [(row.key, row.value) for row in one.rows] == [(b"z", b"0"), (b"k", None)]


def test_row_3_keys_are_not_replaced_across_snapshots_with_cursors() -> None:
    stage = Stage()
    slow = behind(stage, "k1=1 k2=2")
    stage.reader("other", 2)
    stage.queue("k1=3 k2=4")
    assert stage.contents() == ["k1=1 k2=2", "k1=3 k2=4", ""]
    stage.drain(slow)
    assert slow.snapshots == [(1, 2), (3, 4)]


def test_row_7_what_remains_is_exact_across_a_close() -> None:
    stage = Stage("a=1 b=2 c=3")
    reader = stage.reader("c", 0)
    assert stage.statistics("c").items_remaining == 3
    stage.queue("a=4")
    stage.queue("a=5")
    assert stage.statistics("c").items_remaining == 4, "a newer mutation of an open snapshot replaces"
    for left in (3, 2, 1, 0):
        reader.take(1)
        assert stage.statistics("c").items_remaining == left
    stage.manager.persist()
    assert stage.ranges() == []


def test_row_8_every_cursor_gets_every_snapshot() -> None:
    stage = Stage()
    readers = [stage.reader(name, 0) for name in ("a", "b")]
    stage.queue("k1=1 k2=2")
    readers[0].take()
    stage.queue("k1=3")
    entries = stage.manager.persist()
    stage.drain(*readers)
    assert [reader.snapshots for reader in readers] == [[(1, 2), (3, 3)]] * 2
    assert [(entry.start, entry.end) for entry in entries] == [(1, 2), (3, 3)]


def test_rows_9_and_11_limits_are_kept_within_a_snapshot() -> None:
    """A limit is a limit: a cursor stops in the middle of a snapshot and goes on there."""
    stage = Stage("k1=1 k2=2 k3=3")
    reader = stage.reader("c", 0)
    assert reader.take(1) == 1
    assert reader.cursor.snapshot == (1, 3)
    assert reader.take(9, 1) == 1
    assert reader.take(9, 1) == 1
    assert reader.snapshots == [(1, 3)]


def test_row_12_drained_then_a_new_snapshot() -> None:
    stage = Stage()
    readers = [stage.reader(name, 0) for name in ("a", "b")]
    stage.queue("k=1")
    assert [reader.take() for reader in readers] == [1, 1]
    assert [reader.take() for reader in readers] == [0, 0]
    assert [stage.statistics(name).items_remaining for name in ("a", "b", "persistence")] == [0, 0, 1]


def test_rows_14_to_18_a_mutation_that_replaces_one_is_new_for_every_cursor() -> None:
    """Behind the replaced one, at it, past it: each cursor gets the new mutation once."""
    stage = Stage("k1=1 k2=2")
    early, inside, past = (stage.reader(name, after) for name, after in (("early", 0), ("inside", 1), ("past", 2)))
    stage.queue("k1=3")
    assert [stage.statistics(name).items_remaining for name in ("early", "inside", "past")] == [3, 2, 1]
    stage.manager.free_passed()
    stage.drain(early, inside, past)
    assert early.snapshots == [(1, 2), (3, 3)]
    assert inside.snapshots == [(2, 2), (3, 3)]
    assert past.snapshots == [(3, 3)]


def test_row_19_what_remains_over_six_snapshots() -> None:
    stage = Stage()
    readers = []
    for number in range(6):
        readers.append(stage.reader(f"c{number}", stage.topic.high))
        stage.queue(" ".join(f"k{key}={number}" for key in range(number + 1)))
    assert [stage.statistics(f"c{number}").items_remaining for number in range(6)] == [21, 20, 18, 15, 11, 6]
    readers[0].take(4)
    assert stage.statistics("c0").items_remaining == 17
    stage.queue("new=1")
    assert stage.statistics("c0").items_remaining == 18
    assert stage.statistics("persistence").items_remaining == 22


def test_row_20_seqnos_never_decrease_along_a_read() -> None:
    stage = Stage("a=1 b=2 a=3")
    reader = stage.reader("c", 0)
    stage.queue("b=4")
    seqnos = [row.seqno for one in reader.cursor.take(9) for row in one.rows]
    assert seqnos == [2, 3, 4]


def test_row_21_the_size_of_snapshots_follows_the_budget() -> None:
    budget = MemoryBudget(100 * 1024 * 1024)
    assert budget.snapshot_bytes == 8 * 1024 * 1024
    stages = [Stage() for _ in range(5)]
    for number, stage in enumerate(stages):
        budget.add(str(number), stage.manager)
    assert stages[0].manager.chain.limit == 2 * 1024 * 1024
    budget.resize(50 * 1024 * 1024)
    assert {stage.manager.chain.limit for stage in stages} == {1024 * 1024}
    budget.remove("0")
    assert stages[1].manager.chain.limit == 50 * 1024 * 1024 // 40
    budget.resize(1)
    assert budget.snapshot_bytes == 64 * 1024


@pytest.mark.parametrize("batched", [False, True])
def test_row_22_five_mutations_of_the_largest_size_are_five_snapshots(batched: bool) -> None:
    stage = Stage("z=0", max_snapshot_bytes=4_000)
    rows = [(f"k{number}".encode(), b"x" * 4_000) for number in range(5)]
    for part in [rows] if batched else [[row] for row in rows]:
        stage.manager.queue_many(stage.topic.add(part))
    assert stage.ranges() == [(1, 1), *((seqno, seqno) for seqno in range(2, 7))]


def test_row_23_one_mutation_always_fits() -> None:
    stage = Stage("z=0", max_snapshot_bytes=1)
    stage.queue("a=1")
    assert stage.ranges() == [(1, 1), (2, 2)]
    stage.queue("b=1")
    assert stage.ranges() == [(1, 1), (2, 2), (3, 3)]


def test_row_27_what_was_replaced_is_no_reason_to_read_the_log() -> None:
    stage = Stage("z=0")
    stage.each("k=1 k=2 k=3 k=4")
    assert stage.contents()[-1] == "k=4"
    reader = stage.reader("c", 1)
    stage.drain(reader)
    assert reader.snapshots == [(2, 5)]
    assert stage.reads.open == {}
    assert stage.statistics("c").backfill_items == 0


def test_row_28_what_was_let_go_is_a_reason_to_read_the_log() -> None:
    stage = Stage()
    slow = behind(stage, "z=0")
    for key in "abc":
        large(stage, key, 70_000)
        stage.manager.persist()
    assert stage.ranges() == [(1, 1), (2, 4)]
    slow.take(3)
    stage.manager.free_passed()
    assert stage.manager.register("behind", 3).backfill is None
    early = stage.reader("early", 2)
    assert early.cursor.backfill is not None
    stage.drain(early)
    assert early.snapshots == [(3, 3), (4, 4)]


def test_row_29_an_open_snapshot_that_was_evicted() -> None:
    stage = Stage("a=1 b=2")
    stage.manager.evict(1_000_000)
    assert stage.manager.register("high", 2).backfill is None
    reader = stage.reader("below", 1)
    assert reader.cursor.backfill is not None
    stage.drain(reader)
    assert reader.snapshots == [(2, 2)]


def test_rows_30_and_31_registering_at_the_end_stands_in_the_open_snapshot() -> None:
    stage = Stage("z=0")
    stage.queue("a=1")
    cursor = stage.manager.register("c", 2)
    assert cursor.pin is stage.manager.chain.open
    assert not cursor.has_next()
    stage.queue("b=1")
    assert [row.seqno for one in cursor.take(9) for row in one.rows] == [3]


def test_row_32_registering_at_the_start_of_a_snapshot() -> None:
    stage = Stage()
    behind(stage, "a=1 b=1")
    stage.reader("hold", 2)
    stage.queue("c=1 d=1")
    for after, start in ((2, 3), (3, 3), (1, 1), (0, 1)):
        cursor = stage.manager.register("c", after)
        assert cursor.pin is not None
        assert (cursor.pin.start, cursor.backfill) == (start, None)


def test_row_33_registering_again_keeps_or_frees() -> None:
    stage = Stage()
    stage.manager.register("c", 0)
    stage.queue("a=1")
    stage.manager.persist()
    former = stage.manager.register("c", 0)
    assert stage.ranges() == [(1, 1)], "the new one stands where the old one stood"
    later = stage.manager.register("c", 1)
    assert former.finished
    assert stage.ranges() == []
    former.close()
    assert stage.manager.cursors == {"c": later}


def test_row_34_only_the_oldest_snapshots_go() -> None:
    stage = Stage()
    first = behind(stage, "a=1")
    second = stage.reader("second", 1)
    stage.queue("a=2")
    third = stage.reader("third", 2)
    stage.queue("a=3")
    stage.manager.persist()
    second.cursor.close()
    assert stage.ranges() == [(1, 1), (2, 2), (3, 3)], "an older cursor still needs it"
    first.cursor.close()
    assert stage.ranges() == [(3, 3)]
    third.take()
    assert stage.ranges() == []


def test_rows_36_and_38_expelling_what_all_have_passed() -> None:
    stage = Stage()
    slow = behind(stage, "z=0")
    for _ in range(3):
        large(stage, "abc"[_], 70_000)
        stage.manager.persist()
    assert stage.ranges() == [(1, 1), (2, 4)], "one snapshot of three chunks"
    slow.take(3)
    before = stage.manager.chain.account.bytes
    stage.manager.free_passed()
    statistics = stage.manager.statistics()
    assert statistics.items_expelled == 2
    assert statistics.bytes_expelled == before - stage.manager.chain.account.bytes > 140_000
    assert stage.manager.leaving.bytes > 140_000, "the reader still holds what it took last"
    stage.drain(slow)
    assert stage.manager.leaving.bytes == 0
    assert slow.snapshots == [(1, 1), (2, 4)]
    assert stage.manager.chain.account.bytes == Stage().manager.chain.account.bytes
    joined = stage.reader("late", 0)
    stage.drain(joined)


def test_row_37_nothing_is_expelled_under_a_cursor_that_has_taken_nothing() -> None:
    stage = Stage()
    behind(stage, "a=1 b=1")
    before = stage.manager.chain.account.bytes
    stage.manager.free_passed()
    assert stage.manager.chain.account.bytes == before
    assert stage.manager.statistics().items_expelled == 0


def test_row_40_without_cursors_the_open_snapshot_can_be_evicted() -> None:
    stage = Stage("z=0")
    stage.manager.persist()
    large(stage, "a")
    large(stage, "b")
    stage.manager.evict(1_000_000)
    assert stage.manager.statistics().items == 0
    assert [(entry.start, entry.end) for entry in stage.manager.persist()] == [(2, 2), (3, 3)]


def test_row_40_with_cursors_only_what_they_do_not_stand_in_is_evicted() -> None:
    stage = Stage()
    slow = behind(stage, "a=1 b=1")
    slow.take(1)
    stage.queue("c=1")
    stage.queue("d=1")
    stage.manager.evict(1_000_000)
    assert stage.manager.statistics().items == 2
    assert stage.reads.open == {}
    assert slow.take(1) == 1
    assert slow.snapshots == [(1, 2)]
    stage.drain(slow)
    assert slow.snapshots == [(1, 2), (3, 4)]


def test_row_42_cursors_that_may_be_dropped() -> None:
    stage = Stage()
    reader = stage.reader("c", 0)
    stage.queue("a=1")
    stage.manager.drop_cursors(1_000_000)
    assert reader.cursor.drops == 0, "the persistence cursor stands in the same snapshot"
    stage.manager.persist()
    stage.manager.drop_cursors(1_000_000)
    assert reader.cursor.drops == 1
    assert stage.manager.statistics().cursors_dropped == 1
    stage.drain(reader)
    assert reader.snapshots == [(1, 1)]


def test_row_45_cursors_are_woken() -> None:
    stage = Stage()
    reader = stage.reader("c", 0)
    reader.take()
    stage.queue("a=1")
    stage.manager.persist()
    stage.reads.collect()
    assert stage.reads.woken == ["c"]
    stage.manager.drop_cursor(reader.cursor)
    reader.take()
    stage.reads.answer()
    assert stage.reads.woken == ["c", "c"]


def test_rows_46_and_47_counters_are_exact() -> None:
    """`check_chain`, called after every step of every story, counts all bytes anew; this is the way back to none."""
    stage = Stage()
    empty = stage.manager.account.bytes
    slow = behind(stage, "a=1 b=1 =x")
    stage.each("a=2 c=3 a=4 =y a=5")
    stage.manager.persist()
    assert stage.manager.statistics().deduplicated == 2
    assert stage.manager.statistics().index_bytes > 0, "what was collapsed keeps its index"
    stage.manager.collapse()
    check_chain(stage.manager)
    assert stage.manager.statistics().index_bytes == 0
    stage.drain(slow)
    slow.cursor.close()
    assert stage.manager.account.bytes == empty


def test_row_49_mutations_without_a_key_are_never_replaced() -> None:
    stage = Stage("z=0")
    stage.each("=1 a=1 =2 a=2 =2")
    assert stage.contents()[-1] == "=1 =2 a=2 =2"


def test_row_55_a_cursor_can_be_dropped_while_it_reads_the_log() -> None:
    stage = Stage("a=1 b=2")
    stage.manager.persist()
    reader = stage.reader("c", 0)
    reader.take()
    stage.manager.drop_cursor(reader.cursor)
    stage.queue("a=3")
    stage.manager.persist()
    assert stage.ranges() == []
    stage.drain(reader)
    assert reader.snapshots == [(1, 2), (3, 3)]


def test_row_56_a_backfill_of_one_byte_goes_one_by_one() -> None:
    stage = Stage("a=1 b=2 c=3", backfill_bytes=1)
    stage.manager.persist()
    reader = stage.reader("c", 0)
    asked = []
    for _ in range(3):
        assert reader.take() == 0
        stage.reads.collect()
        asked += [(read.first, read.max_bytes) for read in stage.reads.open.values()]
        stage.reads.answer(1)
        assert stage.reads.open == {}, "there is no room until this one is taken"
        assert reader.take(1) == 1
    assert reader.snapshots == [(1, 1), (2, 2), (3, 3)]
    assert asked == [(1, 1), (2, 1), (3, 1)]


def test_row_57_backfills_of_several_cursors_are_apart() -> None:
    stage = Stage("a=1 b=2 c=3")
    stage.manager.persist()
    readers = {name: stage.reader(name, 0) for name in "ab"}
    for reader in readers.values():
        reader.take()
    reads = [effect for effect in stage.manager.take_effects() if isinstance(effect, ReadLog)]
    assert [read.cursor for read in reads] == ["a", "b"]
    with pytest.raises(SeqnoGap):
        stage.manager.backfilled(reads[0].ticket, stage.topic.batch(1, 1).take(slice(0, 0)))
    stage.manager.backfilled(reads[1].ticket, stage.topic.batch(1, 3))
    assert readers["b"].take() == 3
    with pytest.raises(SeqnoGap):
        readers["a"].take()


def test_row_59_a_pull_takes_no_more_than_asked_from_any_source() -> None:
    stage = Stage("a=1 b=2 c=3 d=4")
    stage.manager.persist()
    stage.queue("e=5")
    reader = stage.reader("c", 0)
    reader.take()
    stage.reads.answer()
    assert [reader.take(2), reader.take(2), reader.take(2)] == [2, 2, 1]


def test_row_60_the_old_cursor_of_a_name_harms_the_new_one_no_more() -> None:
    stage = Stage("a=1 b=2")
    stage.manager.persist()
    former = stage.reader("c", 0)
    former.take()
    reader = stage.reader("c", 0)
    effects = stage.manager.take_effects()
    assert [type(effect) for effect in effects] == [ReadLog, StopReading]
    former.cursor.close()
    stage.manager.backfilled(1, stage.topic.batch(1, 2))
    assert former.take() == 0
    stage.drain(reader)
    assert reader.snapshots == [(1, 2)]


def test_row_61_from_now_and_up_to_now() -> None:
    stage = Stage("a=1 b=2")
    stage.manager.persist()
    latest = stage.reader("latest", 2)
    finite = stage.reader("finite", 0, end=2)
    stage.queue("c=3")
    stage.drain(latest, finite)
    assert latest.snapshots == [(3, 3)]
    assert finite.snapshots == [(1, 2)]
    assert finite.cursor.finished
    with pytest.raises(InvalidRequest):
        stage.manager.register("beyond", 4)
