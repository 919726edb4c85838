"""Operations that are applied in lanes lead to one state, in whatever order the lanes work."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io.errors import StorageError
from broker_io.filelog.log.numbers import Change, Lanes, NumberedOperation, ObjectNumbers

STRUCTURE = (Change.MAKE, Change.ROLL, Change.TRIM, Change.PREPARE, Change.SWAP)
History = list[list[tuple[Change, int]]]


class Applied:
    """A state that depends on the order of the operations of each topic, and of those of the manifest."""

    def __init__(self) -> None:
        self.topics: defaultdict[int, tuple[object, ...]] = defaultdict(tuple)
        self.manifest: tuple[object, ...] = ()

    def apply(self, operation: NumberedOperation) -> None:
        if operation.topic:
            self.topics[operation.topic] += (operation.body,)
        if operation.manifest:
            self.manifest += (operation.body, self.topics[operation.topic])


def numbered(history: History) -> list[list[NumberedOperation]]:
    numbers = ObjectNumbers()
    return [
        [numbers.draw(change, topic, (record, at)) for at, (change, topic) in enumerate(operations)]
        for record, operations in enumerate(history)
    ]


def in_order(records: list[list[NumberedOperation]]) -> Applied:
    state = Applied()
    for operation in (each for record in records for each in record):
        state.apply(operation)
    return state


def in_lanes(records: list[list[NumberedOperation]], lanes: int, chance: random.Random) -> Applied:
    """Apply some records in lanes that begin and end in any order."""
    state, work = Applied(), Lanes(lanes, ObjectNumbers(), 0)
    running: list[list[tuple[int, NumberedOperation]]] = []
    added = 0
    while work.applied < len(records):
        choices = ["add"] * (added < len(records)) + ["take"] + ["done"] * len(running)
        choice = chance.choice(choices)
        if choice == "add":
            added += 1
            work.add(added, records[added - 1])
        elif choice == "take" and (taken := work.take()):
            running.append(taken)
            assert len(running) <= lanes
        elif choice == "done":
            taken = running.pop(chance.randrange(len(running)))
            if chance.random() < 0.2:
                work.give_back(taken)
                continue
            for _, operation in taken:
                state.apply(operation)
            work.done(taken)
    return state


operations = st.tuples(st.sampled_from((Change.APPEND, Change.APPEND, *STRUCTURE)), st.integers(1, 4))
histories = st.lists(st.lists(operations, max_size=6), min_size=1, max_size=8)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@given(history=histories, seed=st.integers(0, 2**32))
def test_state_is_the_same_for_any_number_of_lanes(lanes: int, history: History, seed: int) -> None:
    records = numbered(history)
    expected, found = in_order(records), in_lanes(records, lanes, random.Random(seed))
    assert (found.topics, found.manifest) == (expected.topics, expected.manifest)


def test_h11_append_waits_for_the_roll_before_it_and_other_topics_do_not() -> None:
    numbers = ObjectNumbers()
    roll, append, other = (
        numbers.draw(*each, None) for each in ((Change.ROLL, 1), (Change.APPEND, 1), (Change.APPEND, 2))
    )
    lanes = Lanes(8, ObjectNumbers(), 0)
    lanes.add(1, [roll, append, other])
    assert [lanes.take(), lanes.take(), lanes.take()] == [[(1, roll)], [(1, other)], []]
    lanes.done([(1, roll)])
    assert lanes.take() == [(1, append)]


def test_h11_structure_operations_of_different_topics_keep_their_order() -> None:
    numbers = ObjectNumbers()
    first, append, second = (
        numbers.draw(*each, None) for each in ((Change.MAKE, 1), (Change.APPEND, 2), (Change.ROLL, 2))
    )
    lanes = Lanes(8, ObjectNumbers(), 0)
    lanes.add(1, [first, append, second])
    assert [lanes.take(), lanes.take()] == [[(1, first)], [(1, append)]]
    lanes.done([(1, append)])
    assert lanes.take() == []
    lanes.done([(1, first)])
    assert lanes.take() == [(1, second)]


def test_h11_epoch_waits_for_the_manifest_only() -> None:
    numbers = ObjectNumbers()
    append, epoch = numbers.draw(Change.APPEND, 1, None), numbers.draw(Change.EPOCH, 0, None)
    assert (epoch.number, epoch.manifest) == (0, 1)
    lanes = Lanes(2, ObjectNumbers(), 0)
    lanes.add(1, [append])
    lanes.add(2, [epoch])
    assert [lanes.take(), lanes.take()] == [[(1, append)], [(2, epoch)]]
    lanes.done([(2, epoch)])
    assert lanes.applied == 0
    lanes.done([(1, append)])
    assert lanes.applied == 2


def test_structure_operations_that_follow_each_other_are_one_step() -> None:
    numbers = ObjectNumbers()
    changes = ((Change.MAKE, 1), (Change.MAKE, 2), (Change.ROLL, 2), (Change.MAKE, 3))
    made = [numbers.draw(*each, None) for each in changes]
    lanes = Lanes(2, ObjectNumbers(), 0)
    lanes.add(1, made[:1])
    lanes.add(2, made[1:])
    assert [lanes.take(), lanes.take()] == [[(1, made[0]), (2, made[1])], []]
    lanes.done([(1, made[0]), (2, made[1])])
    assert lanes.applied == 1
    assert lanes.take() == [(2, made[2]), (2, made[3])]


def test_h11_numbers_are_counted_again_after_a_cut() -> None:
    numbers = ObjectNumbers()
    kept = [numbers.draw(Change.APPEND, 1, None), numbers.draw(Change.ROLL, 1, None)]
    numbers.draw(Change.APPEND, 1, "cut")
    left = ObjectNumbers().after(kept)
    assert left.draw(Change.APPEND, 1, None).number == 3
    assert left.draw(Change.DELETE, 1, None).manifest == 2
    assert left.topics == {}


def test_missing_number_is_an_error() -> None:
    numbers = ObjectNumbers()
    numbers.draw(Change.APPEND, 1, None)
    second, roll = numbers.draw(Change.APPEND, 1, None), numbers.draw(Change.ROLL, 2, None)
    with pytest.raises(StorageError, match="topic 1: operation 2 follows 0"):
        Lanes(1, ObjectNumbers(), 0).add(1, [second])
    with pytest.raises(StorageError, match="the manifest: operation 1 follows 4"):
        Lanes(1, ObjectNumbers(manifest=4), 0).add(1, [roll])
