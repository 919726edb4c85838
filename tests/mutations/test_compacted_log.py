"""Cursors that read a compacted log, and mutations that compaction has emptied, each rule with an example."""

from __future__ import annotations

import pytest
from mutations.naive_mutations import Reader, Reads, Stage, Topic, check_chain, pairs

from txnbuffer.mutations.cursor import TURN_BYTES, Slice
from txnbuffer.mutations.manager import MemoryBudget, MutationManager

SMALL = 4_000
"""Bytes of a backfill that makes a snapshot of each answer."""


def compact(stage: Stage, upto: int) -> None:
    """Compact the log wholly up to a seqno."""
    stage.manager.compacted(upto)
    stage.topic.empty(upto, lambda seqno: True)
    check_chain(stage.manager)


def in_log(text: str, **options: int) -> Stage:
    """A topic whose mutations are all in the log."""
    stage = Stage(text, **options)
    stage.manager.persist()
    assert stage.ranges() == []
    return stage


def bounds(slices: list[Slice]) -> list[tuple[int, int, bool, bool, int]]:
    return [(*one[:4], len(one.rows)) for one in slices]


@pytest.mark.parametrize("taken", [0, 2])
def test_a_snapshot_of_the_log_ends_at_or_above_where_it_was_compacted(taken: int) -> None:
    """Each answer would be a snapshot of its own, but some of its keys have newer mutations only."""
    stage = in_log("a=1 b=2 a=3 c=4 b=5 d=6 e=7", backfill_bytes=1)
    compact(stage, 5)
    reader = stage.reader("c", taken)
    reader.take()
    while stage.reads.answer(1):
        reader.take(1)
    stage.drain(reader)
    assert reader.snapshots == [(taken + 1, 5), (6, 6), (7, 7)]


def test_a_snapshot_of_any_size_needs_little_memory() -> None:
    topic = Topic()
    budget = MemoryBudget(4 * TURN_BYTES)
    memory = budget.backfill_memory
    manager = MutationManager(account=budget.account, backfill_memory=memory)
    budget.add("t", manager)
    manager.queue_many(topic.add([(b"%d" % (number % 1_200), b"x" * 1_000) for number in range(2_000)]))
    manager.persist()
    reads = Reads(topic, manager)
    manager.compacted(2_000)
    topic.empty(2_000, lambda seqno: True)
    readers = [Reader(topic, manager.register(f"c{number}", 0)) for number in range(3)]
    for _ in range(2_000):
        took = 0
        for reader in readers:
            reader.take(100)
            took += reader.took
            assert manager.backfills.bytes <= memory.bytes
        memory.tick()
        if not reads.answer() and not took:
            break
    assert [reader.snapshots for reader in readers] == [[(1, 2_000)]] * 3


def test_a_log_that_is_compacted_during_a_read_is_read_again() -> None:
    """The snapshot [1, 3] was read and not begun: its end moves."""
    stage = in_log("a=1 b=2 c=3 a=4 b=5 d=6", backfill_bytes=SMALL)
    reader = stage.reader("c", 0)
    reader.take()
    stage.reads.answer(3)
    assert reader.cursor.has_next()
    assert stage.manager.compaction_bound() is None
    compact(stage, 5)
    assert stage.manager.backfills.bytes == 0
    stage.drain(reader)
    assert reader.snapshots == [(1, 5), (6, 6)]


def test_a_waiting_cursor_is_woken_if_its_read_is_repeated() -> None:
    stage = in_log("a=1 b=2 a=3")
    reader = stage.reader("c", 0)
    reader.take()
    stage.reads.collect()
    assert [*stage.reads.open] == [1]
    compact(stage, 3)
    stage.reads.collect()
    assert stage.reads.open == {}
    assert stage.reads.woken == ["c"]
    stage.drain(reader)


def test_compaction_is_bounded_by_the_snapshots_that_are_read_from_the_log() -> None:
    stage = in_log("a=1 b=2 c=3 d=4 e=5 f=6", backfill_bytes=SMALL)
    reader, later = stage.reader("c", 0), stage.reader("d", 3)
    for one in (reader, later):
        one.take()
    while stage.reads.answer(3):
        pass
    assert stage.manager.compaction_bound() is None, "none has begun"
    later.take(1)
    assert stage.manager.compaction_bound() == 6
    reader.take(1)
    assert stage.manager.compaction_bound() == 3
    compact(stage, 3)
    stage.drain(reader)
    assert reader.snapshots[0] == (1, 3)
    assert stage.manager.compaction_bound() == 6
    stage.drain(later)
    assert stage.manager.compaction_bound() is None


def test_a_snapshot_in_memory_does_not_bound_compaction_and_continues_from_the_log_with_a_later_end() -> None:
    stage = Stage()
    reader = stage.reader("c", 0)
    stage.queue("a=1 b=2 c=3 d=4")
    assert reader.take(2) == 2
    stage.queue("d=5 c=6 e=7")
    stage.manager.persist()
    assert stage.manager.compaction_bound() is None
    compact(stage, 7)
    stage.manager.drop_cursor(reader.cursor)
    reader.take()
    stage.reads.answer()
    slices = reader.cursor.take(9)
    assert bounds(slices) == [(1, 7, True, True, 3)]
    assert slices[0].repeats
    reader.check(slices[0])
    assert reader.snapshots == [(1, 7)]


def test_the_rest_of_a_snapshot_begins_again_if_its_keys_may_repeat() -> None:
    """The snapshot [1, 6] was in memory; its rest comes in parts, with the same end."""
    stage = Stage(backfill_bytes=1)
    reader = stage.reader("c", 0)
    stage.queue("a=1 b=2 c=3 d=4 c=5 e=6")
    assert reader.take(2) == 2
    stage.manager.persist()
    compact(stage, 4)
    stage.manager.drop_cursor(reader.cursor)
    reader.take()
    while stage.reads.answer(1):
        for one in reader.cursor.take(9):
            assert one.repeats
            reader.check(one)
    assert reader.snapshots == [(1, 6)]


def test_a_cursor_waits_in_memory_where_its_read_of_the_log_ends() -> None:
    """Compaction passes the place of one cursor, and another one is registered after that."""
    stage = in_log("a=1 b=2 c=3 d=4")
    stage.reader("slow", 4)
    stage.queue("a=5 b=6")
    stage.manager.persist()
    stage.queue("c=7 d=8")
    early = stage.reader("early", 0)
    early.take()
    compact(stage, 7)
    late = stage.reader("late", 0)
    stage.drain(early, late)
    assert early.snapshots == late.snapshots == [(1, 7), (8, 8)]


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize(("emptied", "took"), [((2,), [2]), ((0, 1), [1]), ((0, 1, 2), [0]), ((), [3])])
def test_an_emptied_mutation_has_a_seqno_only(queued: bool, emptied: tuple[int, ...], took: list[int]) -> None:
    stage = Stage()
    stage.manager.queue_many(stage.topic.add(pairs("a=1 b=2 c=3"), emptied))
    check_chain(stage.manager)
    if not queued:
        stage.manager.persist()
    reader = stage.reader("c", 0)
    assert reader.cursor.has_next() == queued
    reader.take()
    stage.reads.answer()
    slices = reader.cursor.take(9) if not queued else []
    for one in slices:
        reader.check(one)
    assert reader.snapshots == [(1, 3)]
    assert reader.cursor.after == 3
    assert reader.cursor.items_sent == took[0]
    assert not reader.cursor.has_next()
    stage.queue("a=4")
    stage.drain(reader)
    assert reader.snapshots == [(1, 3), (4, 4)]


def test_a_snapshot_of_emptied_mutations_has_its_place_in_the_index() -> None:
    stage = Stage("a=1")
    stage.manager.queue_many(stage.topic.add(pairs("b=2 b=3"), (0, 1)))
    entries = stage.manager.persist()
    assert [(entry.start, entry.end, entry.rows) for entry in entries] == [(1, 1, 1), (2, 3, 1)]
    assert stage.manager.anchor(2) == (2, stage.topic.rows[1].position)


def test_a_cursor_with_an_end_among_emptied_mutations_finishes() -> None:
    stage = in_log("a=1 a=2 a=3 b=4 b=5 c=6", backfill_bytes=1)
    stage.topic.unknown |= {5, 6}
    compact(stage, 6)
    reader = stage.reader("c", 0, end=5)
    stage.drain(reader)
    assert reader.snapshots == [(1, 6)]
    assert reader.cursor.finished


def test_what_compaction_reaches_only_grows_and_ends_with_the_topic() -> None:
    stage = in_log("a=1 a=2 a=3")
    assert stage.manager.compacted_to == 0
    for upto, reached in ((2, 2), (1, 2), (9, 3)):
        stage.manager.compacted(upto)
        assert stage.manager.compacted_to == reached
