"""The rows of the manager's conformance checklist, by number; CHECKLIST.md gives the reason for rows without a test."""

from __future__ import annotations

import pytest
from mutations.naive_mutations import Stage, behind, check_chain, large

from txnbuffer.mutations.manager import MemoryBudget


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
    """A cursor stops at a limit in the middle of a snapshot and continues there."""
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
    """Before the replaced one, at it, after it: each cursor gets the new mutation once."""
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


def test_rows_36_and_38_mutations_that_all_cursors_have_passed_are_expelled() -> None:
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


def test_row_37_nothing_is_expelled_before_a_cursor_has_taken_it() -> None:
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


def test_row_40_with_cursors_only_snapshots_without_them_are_evicted() -> None:
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
    assert reader.cursor.drops == 0, "the persistence cursor is in the same snapshot"
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
    """`check_chain` counts all bytes again after each step of each test; here they return to 0."""
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
