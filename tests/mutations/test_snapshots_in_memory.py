"""The rules of snapshots and cursors, each with an example."""

from __future__ import annotations

import numpy as np
import pytest
from mutations.naive_mutations import Reader, Stage, pairs

from broker_io.position import Position
from txnbuffer.errors import InvalidRequest, MutationsTrimmed, SeqnoGap
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.cursor import Cursor
from txnbuffer.mutations.manager import ReadLog


def all_slices(cursor: Cursor) -> list[tuple[int, int, bool, bool, list[Mutation]]]:
    found = []
    while cursor.has_next():
        found += [(*one[:4], list(one.rows)) for one in cursor.take(1)]
    assert cursor.take(1) == []
    return found


def test_a_snapshot_begins_with_its_start_and_never_shows_its_dummy() -> None:
    stage = Stage()
    cursor = stage.manager.register("c", 0)
    assert all_slices(cursor) == []
    stage.queue("k1=v1 k2=v2")
    rows = stage.topic.rows
    assert all_slices(cursor) == [(1, 2, True, False, [rows[0]]), (1, 2, False, True, [rows[1]])]


def test_the_open_snapshot_replaces_and_closes_when_a_cursor_enters() -> None:
    stage = Stage("k0=v0")
    assert stage.contents() == ["k0=v0", ""], "the persistence cursor waited"
    stage.each("k1=v1 k2=v2 k1=v3")
    assert stage.contents() == ["k0=v0", "k2=v2 k1=v3"]
    reader = stage.reader("c", 1)
    assert stage.contents() == ["k0=v0", "k2=v2 k1=v3", ""]
    stage.queue("k1=v4")
    assert stage.contents() == ["k0=v0", "k2=v2 k1=v3", "k1=v4"]
    stage.drain(reader)
    assert reader.snapshots == [(2, 4), (5, 5)]


def test_has_next_closes_no_snapshot() -> None:
    stage = Stage()
    slow = stage.reader("slow", 0)
    reader = stage.reader("c", 0)
    stage.queue("k1=v1")
    stage.queue("k1=v2")
    reader.take(1)
    assert reader.cursor.has_next()
    stage.queue("k1=v3")
    assert stage.contents() == ["k1=v1", "k1=v3"]
    assert reader.take() == 1
    assert reader.snapshots == [(1, 1), (2, 3)]
    stage.drain(slow)
    assert slow.snapshots == [(1, 1), (2, 3)]


def test_waiting_cursors_get_queued_mutations_at_once() -> None:
    stage = Stage()
    readers = [stage.reader(name, 0) for name in ("a", "b")]
    assert [reader.take() for reader in readers] == [0, 0]
    stage.queue("k1=v1 k1=v2")
    stage.reads.collect()
    assert stage.reads.woken == ["a", "b"]
    assert stage.contents() == ["k1=v2", ""]
    stage.queue("k2=v3")
    stage.reads.collect()
    assert stage.reads.woken == ["a", "b"], "nobody waits any more"
    stage.drain(*readers)
    assert [reader.snapshots for reader in readers] == [[(1, 2), (3, 3)]] * 2


def test_snapshots_that_no_cursor_needs_are_freed_at_once() -> None:
    stage = Stage()
    slow, fast = stage.reader("slow", 0), stage.reader("fast", 0)
    stage.manager.persist()
    stage.queue("k1=v1")
    stage.manager.persist()
    fast.take()
    stage.queue("k2=v2")
    fast.take()
    stage.manager.persist()
    assert stage.ranges() == [(1, 1), (2, 2)]
    slow.take(1)
    assert stage.ranges() == [(2, 2)]
    slow.take(1)
    assert stage.ranges() == []


def test_collapse_keeps_the_newest_value_of_each_key() -> None:
    """Two snapshots without cursors between a slow cursor and a fast one: only the newer k7 is kept."""
    stage = Stage()
    slow = stage.reader("slow", 0)
    stage.queue("k5=v6 k6=v7")
    stage.manager.persist()
    stage.queue("k7=v8 k1=v9")
    stage.manager.persist()
    stage.queue("k8=v10 k9=v11 k7=v12")
    assert stage.ranges() == [(1, 2), (3, 4), (5, 7)]
    stage.manager.persist()
    assert stage.ranges() == [(1, 2), (3, 7)]
    assert stage.contents() == ["k5=v6 k6=v7", "k1=v9 k8=v10 k9=v11 k7=v12", ""]
    stage.drain(slow)
    assert slow.snapshots == [(1, 2), (3, 7)]


def test_collapse_keeps_mutations_without_a_key_and_deletions() -> None:
    stage = Stage()
    slow = stage.reader("slow", 0)
    stage.queue("a=1")
    stage.manager.persist()
    for text in ("=1 k=1 x=1", "=2 k- y=1", "=3 y=2"):
        stage.queue(text)
        stage.manager.persist()
    assert stage.contents() == ["a=1", "=1 x=1 =2 k- =3 y=2", ""]
    stage.drain(slow)


def test_collapse_leaves_snapshots_with_a_cursor_alone() -> None:
    stage = Stage()
    readers = []
    for number in range(4):
        readers.append(stage.reader(f"c{number}", number))
        stage.queue(f"k={number}")
    stage.manager.persist()
    assert stage.ranges() == [(1, 1), (2, 2), (3, 3), (4, 4)]
    readers[1].cursor.close()
    assert stage.ranges() == [(1, 1), (2, 2), (3, 3), (4, 4)]
    readers[2].cursor.close()
    assert stage.ranges() == [(1, 1), (2, 3), (4, 4)]
    readers[3].cursor.close()
    assert stage.ranges() == [(1, 1), (2, 4)]
    stage.drain(readers[0])
    assert readers[0].snapshots == [(1, 1), (2, 4)]


def test_collapse_does_not_exceed_the_size_of_snapshots() -> None:
    stage = Stage(max_snapshot_bytes=14_000)
    stage.reader("slow", 0)
    stage.queue("a=1")
    stage.manager.persist()
    for _ in range(4):
        stage.manager.queue_many(stage.topic.add([(f"k{stage.topic.high}".encode(), b"x" * 4_000)]))
        stage.manager.persist()
    assert stage.ranges() == [(1, 1), (2, 3), (4, 5)]


def test_a_cursor_far_behind_reads_the_log_and_then_memory() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3 k4=v4")
    stage.manager.persist()
    assert stage.ranges() == []
    stage.queue("k5=v5 k6=v6")
    reader = stage.reader("c", 0)
    assert reader.take() == 0
    (read,) = [effect for effect in stage.reads.collect() if isinstance(effect, ReadLog)]
    assert (read.first, read.last) == (1, 4)
    stage.queue("k1=v7")
    stage.drain(reader)
    assert reader.snapshots == [(1, 4), (5, 6), (7, 7)]


def test_a_cursor_that_loses_its_place_during_a_backfill_reads_the_log_again() -> None:
    stage = Stage("k1=v1 k2=v2")
    stage.manager.persist()
    reader = stage.reader("c", 0)
    for number in range(3):
        reader.take()
        stage.manager.drop_cursor(reader.cursor)
        stage.queue(f"k1=w{number}")
        stage.manager.persist()
        stage.reads.answer()
    stage.drain(reader)
    assert reader.snapshots[-1][1] == 5
    assert stage.statistics("c").drops == 3
    assert reader.cursor.pin is stage.manager.chain.open


def test_a_cursor_dropped_within_a_snapshot_gets_the_rest_of_that_snapshot() -> None:
    stage = Stage()
    reader = stage.reader("c", 0)
    stage.queue("k1=v1 k2=v2 k3=v3 k2=v4 k4=v5")
    assert reader.take(2) == 2
    assert reader.cursor.snapshot == (1, 5)
    stage.manager.drop_cursor(reader.cursor)
    stage.manager.persist()
    assert stage.ranges() == []
    stage.queue("k1=v6")
    stage.manager.persist()
    assert reader.take() == 0
    assert stage.reads.answer(1)
    stage.drain(reader)
    assert reader.snapshots == [(1, 5), (6, 6)]


def test_a_small_backfill_completes_a_snapshot_begun_elsewhere() -> None:
    stage = Stage("k1=v1 k2=v2 k1=v3 k2=v4 k3=v5", backfill_bytes=1)
    stage.manager.persist()
    reader = stage.reader("c", 1, snapshot_end=4)
    assert reader.take() == 0
    while stage.reads.answer(1):
        pass
    assert reader.cursor.has_next()
    stage.drain(reader)
    assert reader.snapshots == [(2, 4), (5, 5)]


def test_a_reader_that_holds_part_of_a_snapshot_gets_no_shorter_one() -> None:
    stage = Stage("k1=v1 k2=v2")
    stage.manager.persist()
    stage.queue("k3=v3 k1=v4")
    stage.manager.persist()
    stage.queue("k2=v5 k3=v6")
    reader = stage.reader("c", 3, snapshot_end=5)
    stage.drain(reader)
    assert reader.snapshots == [(4, 5), (6, 6)]
    again = stage.reader("d", 1, snapshot_end=6)
    stage.drain(again)
    assert again.snapshots == [(2, 6)]


@pytest.mark.parametrize(("end", "snapshots"), [(1, [(1, 1)]), (2, [(1, 2)]), (3, [(1, 3)]), (9, [(1, 3), (4, 6)])])
def test_a_cursor_with_an_end_stops_with_the_snapshot_that_holds_it(end: int, snapshots: list[tuple[int, int]]) -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3")
    stage.manager.persist()
    stage.queue("k1=v4 k2=v5 k3=v6")
    reader = stage.reader("c", 0, end=end)
    stage.drain(reader)
    assert reader.snapshots == snapshots
    assert reader.cursor.finished == (end <= 6)


def test_an_end_within_memory_gives_the_whole_snapshot_and_holds_no_place_after_it() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3")
    reader = stage.reader("c", 0, end=2)
    stage.drain(reader)
    assert reader.snapshots == [(1, 3)]
    assert reader.cursor.finished
    assert reader.cursor.pin is None
    stage.queue("k1=v4")
    assert reader.take() == 0


def test_a_cursor_in_a_snapshot_continues_it() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3")
    cursor = stage.manager.register("c", 0)
    (one,) = cursor.take(1)
    assert (*one[:4], list(one.rows)) == (1, 3, True, False, [stage.topic.rows[0]])
    assert cursor.snapshot == (1, 3)
    (one,) = cursor.take(1)
    assert (one.begins, one.ends, list(one.rows)) == (False, False, [stage.topic.rows[1]])
    assert cursor.has_next()
    (rest,) = cursor.take(9)
    assert (rest.begins, rest.ends, list(rest.rows)) == (False, True, [stage.topic.rows[2]])
    assert not cursor.has_next()
    assert cursor.snapshot is None


def test_take_limits_bytes_but_returns_at_least_one() -> None:
    stage = Stage("k1=aaaa k2=bbbb k3=cccc")
    reader = stage.reader("c", 0)
    assert [reader.take(9, 1), reader.take(9, 12), reader.take(9, 12)] == [1, 2, 0]
    assert Reader(stage.topic, stage.manager.register("d", 0)).take(9, 11) == 1
    with pytest.raises(ValueError, match="limit must be at least 1"):
        reader.cursor.take(0)


def test_queueing_a_gap_is_rejected() -> None:
    stage = Stage("k=1 k=2")
    rows = stage.topic.add(pairs("a=1 b=1 c=1"))
    for bad in (rows.take(slice(1, 3)), rows.take(np.array([True, False, True])), rows.take(np.array([1, 0, 2]))):
        with pytest.raises(SeqnoGap):
            stage.manager.queue_many(bad)
        assert stage.manager.high == 2
    stage.manager.queue_many(rows.take(slice(0, 0)))
    stage.manager.queue_many(rows)
    with pytest.raises(SeqnoGap):
        stage.manager.queue_many(rows)
    assert stage.manager.high == 5


def test_a_gap_in_an_answer_of_the_log_stops_only_its_cursor() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3")
    stage.manager.persist()
    bad, good = stage.reader("bad", 0), stage.reader("good", 0)
    bad.take()
    (read,) = [effect for effect in stage.manager.take_effects() if isinstance(effect, ReadLog)]
    with pytest.raises(SeqnoGap, match=r"returned 2 to 3 .* instead of mutations 1 to 3"):
        stage.manager.backfilled(read.ticket, stage.topic.batch(2, 3))
    for _ in range(2):
        with pytest.raises(SeqnoGap):
            bad.cursor.take(1)
    stage.manager.backfilled(read.ticket, stage.topic.batch(1, 3))
    stage.drain(good)
    bad.cursor.close()
    assert good.complete == 3


@pytest.mark.parametrize("rows", [(), (1, 2), (0, 1, 2, 3)])
def test_an_answer_that_was_not_requested_is_rejected(rows: tuple[int, ...]) -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3")
    stage.manager.persist()
    stage.queue("k4=v4")
    reader = stage.reader("c", 0)
    reader.take()
    (read,) = [effect for effect in stage.manager.take_effects() if isinstance(effect, ReadLog)]
    with pytest.raises(SeqnoGap):
        stage.manager.backfilled(read.ticket, MutationBatch.of([stage.topic.rows[row] for row in rows]))


def test_a_failed_read_is_raised_after_the_mutations_read() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3 k4=v4", backfill_bytes=4_000, max_snapshot_bytes=2_000)
    stage.manager.persist()
    reader = stage.reader("c", 0)
    reader.take()
    stage.reads.answer(2)
    (ticket,) = stage.reads.open
    stage.manager.backfill_failed(ticket, OSError("gone"))
    assert reader.take() == 2
    with pytest.raises(OSError, match="gone"):
        reader.take()
    with pytest.raises(OSError, match="gone"):
        reader.cursor.has_next()


def test_a_cursor_after_the_end_or_before_the_beginning_is_rejected() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3 k4=v4")
    with pytest.raises(InvalidRequest, match="ends at 4"):
        stage.manager.register("c", 5)
    with pytest.raises(InvalidRequest, match="ends at 4"):
        stage.manager.register("c", 3, snapshot_end=5)
    with pytest.raises(InvalidRequest):
        stage.manager.register("c", -1)
    with pytest.raises(InvalidRequest, match="another"):
        stage.manager.register("persistence", 0)
    stage.manager.trim(3)
    with pytest.raises(MutationsTrimmed, match="mutation 2 was trimmed, the first one in the log is 3"):
        stage.manager.register("c", 1)
    assert stage.manager.cursors == {}
    stage.manager.register("c", 2)


def test_zero_starts_at_the_oldest_mutation() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3 k4=v4")
    stage.manager.persist()
    stage.manager.trim(3)
    reader = stage.reader("c", 0)
    assert reader.cursor.after == 2
    stage.drain(reader)
    assert reader.snapshots == [(3, 4)]


def test_trimming_during_a_backfill_is_an_error() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3 k4=v4", backfill_bytes=4_000, max_snapshot_bytes=2_000)
    stage.manager.persist()
    reader = stage.reader("c", 0)
    reader.take()
    stage.manager.trim(4)
    stage.reads.answer(2)
    assert reader.take() == 2
    with pytest.raises(MutationsTrimmed):
        reader.take()


def test_a_manager_continues_where_another_one_ended() -> None:
    stage = Stage("k1=v1 k2=v2 k3=v3")
    stage.manager.persist()
    stage.manager = type(stage.manager)(3, index=stage.manager.index)
    stage.reads.manager = stage.manager
    stage.queue("k1=v4")
    reader = stage.reader("c", 1)
    stage.drain(reader)
    assert reader.snapshots == [(2, 3), (4, 4)]
    assert stage.manager.anchor(2) == (1, Position(0, 1))


def test_mutations_are_returned_as_queued() -> None:
    rows = [
        Mutation(1, Position(3, 4, 5), b"k", b"v", {"a": "1", "b": "x"}, 7, 8),
        Mutation(2, Position(3, 4, 6), None, b"", {"b": "y"}, 0, 9),
        Mutation(3, Position(3, 5), b"", None, {}, 0, 10),
    ]
    stage = Stage()
    stage.manager.queue_many(MutationBatch.of(rows))
    assert [row for one in all_slices(stage.manager.register("c", 0)) for row in one[-1]] == rows
