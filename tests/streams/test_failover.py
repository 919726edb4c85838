"""The failover log: rules for adding, pruning and sanitising it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.streams.failover import MAX_SEQNO, MAX_UUID, FailoverLog, Version, dropped_above, rollback_point

FIVE = FailoverLog(tuple(Version(uuid, seqno) for uuid, seqno in ((5, 400), (4, 300), (3, 200), (2, 100), (1, 0))))


def test_row_50_initial_log_entries_and_edges() -> None:
    first = FailoverLog.initial(7)
    assert first.versions == (Version(7, 0),)
    assert first.end_of(7, 120) == 120
    assert [FIVE.end_of(uuid, 999) for uuid in (5, 4, 3, 2, 1, 6)] == [999, 400, 300, 200, 100, None]
    assert first.created(8, 0).versions == (Version(8, 0), Version(7, 0)), "a branch at 0"
    assert first.created(8, 0).end_of(7, 50) == 0
    assert first.created(MAX_UUID, MAX_SEQNO).end_of(7, MAX_SEQNO) == MAX_SEQNO


def test_row_51_creating_drops_later_versions() -> None:
    assert FIVE.created(6, 500).versions == (Version(6, 500), *FIVE.versions)
    assert FIVE.created(6, 199).versions == (Version(6, 199), Version(2, 100), Version(1, 0))
    assert FIVE.created(6, 200).versions[:2] == (Version(6, 200), Version(3, 200)), "as late is not later"


def test_row_51_the_newest_25_are_kept() -> None:
    log = FailoverLog.initial(1)
    for number in range(2, 32):
        log = log.created(number, 10 * number)
    assert [version.uuid for version in log.versions] == list(range(31, 6, -1))


def test_row_51_pruning() -> None:
    assert dropped_above(FIVE.versions, 250) == FIVE.versions[2:]
    assert dropped_above(FIVE.versions, 400) == FIVE.versions
    assert dropped_above(FIVE.versions, 0) == (Version(1, 0),)
    assert dropped_above((Version(9, 4),), 3) == ()


@pytest.mark.parametrize(
    ("stored", "left"),
    [
        (((0, 10), (1, 5)), ((1, 5),)),
        (((3, 10), (2, 20), (1, 5)), ((3, 10), (1, 5))),
        (((3, 10), (2, 7), (3, 5)), ((2, 7), (3, 5))),
        (((MAX_UUID + 1, 3), (1, -1), (1, MAX_SEQNO + 1)), ((99, 0),)),
        ((), ((99, 0),)),
    ],
)
def test_row_51_sanitising(stored: tuple[tuple[int, int], ...], left: tuple[tuple[int, int], ...]) -> None:
    assert FailoverLog.sanitised((Version(*pair) for pair in stored), 99).versions == left


@given(st.lists(st.builds(Version, st.integers(-1, 40), st.integers(-1, 60)), max_size=60))
def test_any_stored_log_is_repaired(stored: list[Version]) -> None:
    log = FailoverLog.sanitised(stored, 99)
    assert FailoverLog.sanitised(log.versions, 98) == log
    assert set(log.versions) <= {*stored, Version(99, 0)}


@pytest.mark.parametrize(
    "versions",
    [(), ((0, 0),), ((1, 5), (2, 6)), ((1, 5), (1, 4)), ((1, -1),), tuple((n, 0) for n in range(1, 1002))],
)
def test_invalid_logs_are_rejected(versions: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="version"):
        FailoverLog(tuple(Version(*pair) for pair in versions))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_a_reader_goes_back_to_the_point_of_a_copy(steps: list[int], data: st.DataObject) -> None:
    """Each owner writes; a copy is taken at any point, both continue, and a reader of one moves to the other."""
    at = data.draw(st.integers(0, len(steps)))
    uuids = iter(range(2, 1000))

    def owned(log: FailoverLog, seqno: int, owners: list[int]) -> tuple[FailoverLog, int]:
        for written in owners:
            log, seqno = log.taken_over(next(uuids), seqno), seqno + written
        return log, seqno

    copy, copied = owned(FailoverLog.initial(1), 0, steps[:at])
    gone, high = owned(copy, copied, steps[at:])
    held = data.draw(st.integers(0, high))
    log, newest = owned(copy, copied, data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=20)))
    point = rollback_point(held, held, held, gone.for_readers.versions, log, newest)
    if at < len(steps):
        assert point == (copied if held > copied else None)
    beginnings = [version.seqno for version in log.versions]
    assert len({*beginnings[:-1]}) == len(beginnings[:-1])
