"""The memory limit of several topics: what is freed first, and how much."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from mutations.naive_mutations import Reader, Stage, check_chain

from txnbuffer.mutations.manager import MemoryBudget, Recovery


def topics(budget: MemoryBudget, *sizes: int) -> list[tuple[Stage, Reader]]:
    """Topics with a slow cursor before mutations of 10,000 bytes; the persistence cursor is at the end."""
    made = []
    for number, size in enumerate(sizes):
        stage = Stage(account=budget.account)  # type: ignore[arg-type]  # the only option that is no number
        budget.add(str(number), stage.manager)
        reader = stage.reader("slow", 0)
        stage.queue("z=0")
        stage.manager.persist()
        stage.manager.chain.limit = 45_000
        for row in range(size):
            stage.manager.queue_many(stage.topic.add([(f"k{row}".encode(), b"x" * 10_000)]))
        stage.manager.persist()
        check_chain(stage.manager)
        made.append((stage, reader))
    return made


def test_nothing_happens_below_the_upper_mark() -> None:
    budget = MemoryBudget(200_000)
    topics(budget, 10)
    before = budget.account.bytes
    assert 100_000 < before < 180_000
    assert not budget.pressed
    assert budget.recover() == Recovery()
    assert budget.account.bytes == before


def test_row_44_the_biggest_topic_is_freed_first_down_to_the_lower_mark() -> None:
    budget = MemoryBudget(220_000)
    (small, _), (big, slow) = topics(budget, 5, 15)
    assert budget.pressed
    recovery = budget.recover()
    assert recovery.missing == 0
    assert recovery.evicted > 0
    assert recovery.dropped == 0
    assert small.manager.statistics().snapshots_evicted == 0
    assert 0.3 * 220_000 < budget.account.bytes <= 0.6 * 220_000
    assert budget.recover() == Recovery()
    check_chain(big.manager)
    big.drain(slow)
    assert slow.complete == 16


def test_row_43_cursors_are_dropped_last() -> None:
    budget = MemoryBudget(100_000)
    ((stage, slow),) = topics(budget, 12)
    slow.take(1)
    slow.take(1)
    assert slow.cursor.after == 2
    budget.resize(20_000)
    recovery = budget.recover()
    assert recovery.evicted > 0
    assert recovery.dropped > 0
    assert slow.cursor.drops == 1
    stage.drain(slow)
    assert slow.complete == 13
    assert slow.snapshots[1][0] == 2


def test_row_43_freeing_what_all_have_passed_suffices() -> None:
    budget = MemoryBudget(1_000_000)
    ((stage, slow),) = topics(budget, 12)
    stage.manager.chain.limit = 1_000_000
    stage.manager.collapse()
    assert stage.ranges() == [(1, 1), (2, 13)]
    slow.take(9)
    budget.budget = int(stage.manager.account.bytes / 0.95)
    recovery = budget.recover()
    assert recovery == Recovery(passed=recovery.passed)
    assert recovery.passed > 50_000
    assert slow.take() == 4


def test_row_43_collapsing_suffices() -> None:
    budget = MemoryBudget(1_000_000)
    stage = Stage(account=budget.account)  # type: ignore[arg-type]  # the only option that is no number
    budget.add("t", stage.manager)
    reader = stage.reader("slow", 0)
    stage.queue("z=0")
    stage.manager.persist()
    stage.manager.chain.limit = 26_500
    for _ in range(6):
        for key in (b"a", b"b"):
            stage.manager.queue_many(stage.topic.add([(key, b"x" * 10_000)]))
        stage.manager.persist()
    assert len(stage.ranges()) == 7
    budget.budget = int(stage.manager.account.bytes / 0.95)
    recovery = budget.recover()
    assert recovery == Recovery(passed=recovery.passed, collapsed=recovery.collapsed)
    assert stage.ranges() == [(1, 1), (2, 13)]
    stage.drain(reader)
    assert reader.snapshots == [(1, 1), (2, 13)]


def test_row_44_memory_in_use_by_a_reader_counts_as_freed() -> None:
    budget = MemoryBudget(10_000_000)
    ((stage, slow),) = topics(budget, 12)
    stage.manager.persist()
    other = stage.reader("other", 1)
    slow.cursor.close()
    slices = other.cursor.take(100)
    leaving = stage.manager.leaving.bytes
    assert leaving > 120_000
    assert slices
    budget.resize(130_000)
    assert budget.pressed
    assert budget.recover() == Recovery()
    other.cursor.take(1)
    assert stage.manager.leaving.bytes == 0
    assert not budget.pressed


def test_memory_that_could_not_be_freed_is_looked_at_again_after_a_step() -> None:
    budget = MemoryBudget(640_000)
    budget.account.add(500_000)
    assert not budget.due
    budget.account.add(100_000)
    assert budget.due
    assert budget.recover().missing == 600_000 - 384_000
    budget.account.add(10_000)
    assert not budget.due
    budget.account.add(1)
    assert budget.due
    budget.account.add(-100_000)
    assert not budget.due
    budget.account.add(90_000)
    assert budget.due, "there was room meanwhile"


def test_invalid_marks_are_rejected() -> None:
    for lower, upper in ((0.0, 0.9), (0.9, 0.6), (0.5, 1.1)):
        with pytest.raises(ValueError, match="marks"):
            MemoryBudget(1, upper=upper, lower=lower)


def test_a_removed_topic_is_not_counted() -> None:
    budget = MemoryBudget(10_000_000)
    (one, _), (two, _) = topics(budget, 3, 3)
    budget.remove("0")
    assert budget.account.bytes == two.manager.account.bytes
    one.queue("a=1")
    assert budget.account.bytes == two.manager.account.bytes


@pytest.mark.parametrize(("size", "value"), [(1, 10), (1, 5_000), (50, 100), (1_000, 20)])
def test_counted_bytes_are_those_of_python(size: int, value: int) -> None:
    stage = Stage("z=0")
    stage.reader("slow", 0)
    fresh = itertools.count()
    batches = [
        stage.topic.add([(b"key-%08d" % next(fresh), bytes(value)) for _ in range(size)])
        for _ in range(max(3, 2_000 // size))
    ]
    stage.topic.rows.clear()
    batches = [batch.take(slice(None)).owned() for batch in batches]
    before = stage.manager.account.bytes
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        while batches:
            batch = batches.pop(0)
            stage.manager.queue_many(type(batch).of(list(batch)))
            del batch
        taken = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    counted = stage.manager.account.bytes - before
    assert 0.6 < counted / taken < 1.5
