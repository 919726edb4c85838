"""A simulated pair: its machines replicate and take over, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sim.history import Fate, History, Shown
from sim.kinds import run_seed
from sim.pair import PairScenario, TopicCopy
from sim.pair_faults import PAIR, PairFaults
from sim.reduction import Part
from sim.scenario import Size
from sim.world import Finding, World

from broker_io.filelog.log.records import Mark
from broker_io.filelog.replication.lock import LockRecord
from broker_io.position import LEDGERS_OF_A_HISTORY
from txnbuffer.model import Position

A, B = b"\x0a" * 16, b"\x0b" * 16
SMALL = Size(1, 5, 0, 2.0)


@pytest.fixture
def ended() -> Iterator[PairScenario]:
    """A pair that has run without faults."""
    with World(seed=2) as world:
        scenario = PairScenario(world, PAIR, SMALL, Part(roles=()))
        scenario.run()
        yield scenario


def segment_of(scenario: PairScenario, machine: int) -> str:
    """The largest segment on a machine."""
    segments = scenario._segments(scenario.services[machine].host)
    return max(segments, key=lambda path: len(segments[path]))


def test_both_machines_have_the_log_and_what_differs_is_found(ended: PairScenario) -> None:
    faults = ended.faults
    assert isinstance(faults, PairFaults)
    assert {*ended.lock.record.in_sync} == {faults._store_of(one) for one in ended.services}
    one, other = (ended._segments(service.host) for service in ended.services)
    assert one.keys() == other.keys()
    check_changed_segment(ended)
    check_missing_record(ended)


def check_changed_segment(ended: PairScenario) -> None:
    path, disk = segment_of(ended, 1), ended.services[1].host.disk
    disk.flip(path, 8 * 100)
    with pytest.raises(Finding, match="of both machines differ"):
        ended._compare_files()
    disk.flip(path, 8 * 100)
    ended._compare_files()


def check_missing_record(ended: PairScenario) -> None:
    ended._compare_logs()
    topic, records = next((topic, records) for topic, records in ended.left.items() if records)
    records.append(records[-1]._replace(position=Position(9, 9)))
    with pytest.raises(Finding, match=f"{topic} of alpha lacks"):
        ended._compare_logs()


def entries_of(*numbers: int, ledger: int = 3) -> list[tuple[Position, bytes, bytes]]:
    return [(Position(ledger, number), b"key", b"value") for number in numbers]


def test_copies_differ_unless_one_has_only_not_applied_the_last_changes() -> None:
    copy = TopicCopy({3: 0, 4: 0}, [*entries_of(0, 1, 2, 3), *entries_of(0, 1, ledger=4)])
    same = [
        copy,
        TopicCopy({3: 0, 4: 0}, copy.entries[:-1]),
        TopicCopy({3: 0}, copy.entries[:4]),
        TopicCopy({4: 0}, copy.entries[4:]),  # trimmed
        TopicCopy({3: 1, 4: 0}, [*entries_of(2), *copy.entries[4:]]),  # compacted
        TopicCopy({3: 1, 4: 1, 5: 0}, [*entries_of(2), *copy.entries[5:], *entries_of(0, ledger=5)]),
    ]
    other = [
        TopicCopy({3: 0, 4: 0}, copy.entries[1:]),
        TopicCopy({3: 0, 4: 0}, [*copy.entries[:3], *copy.entries[4:]]),
        TopicCopy({3: 0, 4: 0}, [*copy.entries[:3], (Position(3, 3), b"key", b"other")]),
        TopicCopy({3: 1, 4: 0}, [*entries_of(2, 9), *copy.entries[4:]]),
        TopicCopy({3: 1, 4: 0}, [*entries_of(2), *copy.entries[5:]]),
        TopicCopy({3: 0, 4: 1}, [*copy.entries[:4], (Position(4, 1), b"key", b"other")]),
    ]
    assert not any(copy.differs(each) or each.differs(copy) for each in same)
    assert all(copy.differs(each) and each.differs(copy) for each in other)


def test_two_lives_in_an_epoch_and_two_records_with_a_number_are_found() -> None:
    with World(seed=3) as world:
        scenario = PairScenario(world, PAIR, SMALL, Part(roles=()))
        scenario._serves(7, A)
        scenario._serves(7, A)
        scenario._commits(Mark(1, 2, 3))
        assert world.failure is None
        scenario._serves(7, B)
        assert "serves in epoch 7" in (world.failure or "")
        world.failure = None
        scenario._commits(Mark(1, 2, 4))
        assert "are both committed" in (world.failure or "")


def test_a_commit_that_returns_after_a_forced_promotion_has_dropped_it_is_no_second_history() -> None:
    with World(seed=3) as world:
        scenario = PairScenario(world, PAIR, SMALL, Part(roles=()))
        scenario._commits(Mark(1, 2, 3))
        record = LockRecord(1, 1, A, (A,), Mark(1, 2, 3), None)
        scenario._swapped(record, LockRecord(2, 2, B, (B,), Mark(1, 2, 3), Mark(1, 2, 3)))
        scenario._commits(Mark(1, 3, 4))
        scenario._commits(Mark(2, 3, 5))
        assert world.failure is None
        scenario._commits(Mark(2, 3, 6))
        assert "are both committed" in (world.failure or "")


def test_what_a_reader_has_shown_counts_again_if_it_continues_after_a_forced_promotion() -> None:
    history = History(lambda: 1.0, lambda _: None)
    ends, continues = (history.reading(name, "topic") for name in ("ends", "continues"))
    for reading in (ends, continues):
        history.read(reading, [shown(1, 1), shown(1, 2)])
    history.may_lose()
    history.read(ends, [shown(1, 3)])
    assert history.readings == []
    for number in (3, 4):
        history.read(continues, [shown(LEDGERS_OF_A_HISTORY, number)])
    assert history.readings == [continues]
    assert [record.seqno for record in continues.records] == [1, 2, 3, 4]


def shown(ledger: int, number: int) -> Shown:
    return Shown(number, b"k", b"%d" % number, Position(ledger, number))


def test_a_forced_promotion_may_lose_what_was_committed_before_it_only() -> None:
    history = History(lambda: 1.0, lambda _: None)
    known, late, aborted = (history.attempt("writer") for _ in range(3))
    history.ended(known, Fate.COMMITTED)
    history.ended(aborted, Fate.ABORTED)
    history.reading("reader", "topic")
    history.may_lose()
    history.ended(late, Fate.COMMITTED)
    later = history.attempt("writer")
    history.ended(later, Fate.COMMITTED)
    assert [one.fate for one in (known, late, aborted, later)] == [
        Fate.ASKED,
        Fate.ASKED,
        Fate.ABORTED,
        Fate.COMMITTED,
    ]
    assert history.readings == []
    unanswered = history.attempt("writer")
    history.asked(unanswered)
    for one in (known, late, unanswered):
        history.learned(one, committed=one is late)
    assert [one.fate for one in (known, late, unanswered)] == [Fate.LOST, Fate.COMMITTED, Fate.ABORTED]


def test_the_live_role_moves_and_a_forced_promotion_loses_records() -> None:
    faults = dict.fromkeys(PAIR, 0) | {"kill service": 1, "switch": 1, "wiped disk": 1}
    found = [run_seed(seed, "pair", Size(2, 8, 6, 20.0), faults=faults, part=Part(roles=())) for seed in (2, 3)]
    faults = dict.fromkeys(PAIR, 0) | {"forced promotion": 1}
    found.append(run_seed(54, "pair", Size(2, 8, 4, 10.0), faults=faults))
    assert [one.finding for one in found] == ["", "", ""]
    assert all(one.counts["change of the primary"] > 1 and one.counts["joined backup"] > 1 for one in found)
    assert found[-1].counts["lost records"]
