"""The rows of the conformance checklist about places of cursors and reads of the log."""

from __future__ import annotations

import pytest
from mutations.naive_mutations import Stage, behind, large

from txnbuffer.errors import InvalidRequest, SeqnoGap
from txnbuffer.mutations.manager import ReadLog, StopReading


def test_row_27_replaced_mutations_are_not_read_from_the_log() -> None:
    stage = Stage("z=0")
    stage.each("k=1 k=2 k=3 k=4")
    assert stage.contents()[-1] == "k=4"
    reader = stage.reader("c", 1)
    stage.drain(reader)
    assert reader.snapshots == [(2, 5)]
    assert stage.reads.open == {}
    assert stage.statistics("c").backfill_items == 0


def test_row_28_freed_mutations_are_read_from_the_log() -> None:
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


def test_rows_30_and_31_registering_at_the_end_uses_the_open_snapshot() -> None:
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
    assert stage.ranges() == [(1, 1)], "the new one is where the old one was"
    later = stage.manager.register("c", 1)
    assert former.finished
    assert stage.ranges() == []
    former.close()
    assert stage.manager.cursors == {"c": later}


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


def test_row_57_backfills_of_several_cursors_are_independent() -> None:
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


def test_row_60_the_old_cursor_of_a_name_does_not_affect_the_new_one() -> None:
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
