"""The rollback point: test vectors of other implementations, and properties for any history."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from txnbuffer.streams.failover import FailoverLog, Version, common_seqno, rollback_point

A, B, W, X, Y, Z = 0xA, 0xB, 0x10, 0x11, 0x12, 0x13
OK = None


def log(*versions: tuple[int, int]) -> FailoverLog:
    return FailoverLog(tuple(Version(*version) for version in versions))


ONE = log((W, 0))
TWO = log((B, 3), (A, 0))
THREE = log((Y, 900), (X, 500), (W, 0))


@pytest.mark.parametrize(
    ("table", "high", "start", "uuid", "bounds", "result"),
    [
        (ONE, 300, 200, W, (200, 200), OK),
        (ONE, 300, 200, W, (200, 301), OK),
        (ONE, 300, 300, W, (300, 301), OK),
        (ONE, 300, 400, W, (400, 400), 300),
        (ONE, 300, 220, W, (210, 301), 210),
        (ONE, 300, 310, W, (210, 320), 210),
        (ONE, 300, 10, Z, (0, 20), 0),
        (TWO, 10, 3, A, (1, 4), 1),
        (TWO, 10, 3, A, (3, 3), OK),
        (THREE, 1200, 400, W, (350, 450), OK),
        (THREE, 1200, 500, W, (450, 500), OK),
        (THREE, 1200, 490, W, (450, 520), 450),
        (THREE, 1200, 600, W, (550, 650), 500),
        (THREE, 1200, 600, W, (450, 600), 500),
        (THREE, 1200, 600, X, (550, 650), OK),
        (THREE, 1200, 950, X, (940, 960), 900),
        (THREE, 1200, 950, Y, (940, 960), OK),
        (THREE, 1200, 1300, Y, (1300, 1300), 1200),
    ],
)
def test_vectors(
    table: FailoverLog, high: int, start: int, uuid: int, bounds: tuple[int, int], result: int | None
) -> None:
    assert rollback_point(start, *bounds, (Version(uuid, 0),), table, high) == result


@pytest.mark.parametrize(
    ("start", "known", "result"), [(600, 0, 0), (600, 700, OK), (0, 0, OK), (700, 0, OK), (699, 0, 0)]
)
def test_vectors_of_the_purge_seqno(start: int, known: int, result: int | None) -> None:
    bounds = start, start
    found = rollback_point(start, *bounds, (Version(W, 0),), ONE, 900, purge_seqno=700, known_purge_seqno=known)
    assert found == result


def test_the_purge_rule_compares_the_start_and_not_the_snapshot() -> None:
    assert rollback_point(800, 650, 850, (Version(W, 0),), ONE, 900, purge_seqno=700) is OK


@pytest.mark.parametrize(("versions", "result"), [((Version(Z, 0),), 0), ((), OK), ((Version(W, 0),), OK)])
def test_vectors_of_a_strict_request_since_zero(versions: tuple[Version, ...], result: int | None) -> None:
    assert rollback_point(0, 0, 0, versions, ONE, 300, strict=True) == result
    assert rollback_point(0, 0, 0, versions, ONE, 300) is OK


def test_an_older_version_of_the_client_is_found() -> None:
    versions = Version(Z, 450), Version(W, 0)
    assert rollback_point(440, 440, 440, versions, THREE, 1200) is OK
    assert rollback_point(600, 600, 600, (Version(Z, 0x3E8), *versions), THREE, 1200) == 450


def test_the_end_of_a_version_at_the_client_counts_as_much_as_that_here() -> None:
    """Up to 500 both were on W; the client left it at 450, and its mutations after that are not in this history."""
    assert common_seqno((Version(Z, 450), Version(W, 0)), THREE, 1200) == 450
    assert common_seqno((Version(Z, 700), Version(W, 0)), THREE, 1200) == 500
    assert common_seqno((Version(Z, 450),), THREE, 1200) is None


def test_a_client_on_an_old_version_with_nothing_to_undo_continues() -> None:
    """If it had to go back to 500 while it is at 400, it would repeat the request for ever."""
    assert rollback_point(400, 400, 400, (Version(W, 0),), THREE, 1200) is OK


seqnos = st.integers(0, 30)


@st.composite
def logs(draw: st.DrawFn) -> FailoverLog:
    starts = sorted(draw(st.lists(seqnos, min_size=1, max_size=4)), reverse=True)
    uuids = draw(st.lists(st.integers(1, 6), min_size=len(starts), max_size=len(starts), unique=True))
    return log(*zip(uuids, starts, strict=True))


@given(logs(), st.lists(seqnos, min_size=3, max_size=3), st.lists(st.tuples(st.integers(1, 8), seqnos), max_size=4))
def test_a_client_that_rolls_back_has_to_do_so_only_once(
    table: FailoverLog, numbers: list[int], held: list[tuple[int, int]]
) -> None:
    snapshot_start, start, snapshot_end = sorted(numbers)
    held = sorted(held, key=lambda version: version[1], reverse=True)
    assume(len({uuid for uuid, _ in held}) == len(held))
    versions = tuple(Version(*version) for version in held)
    high = max(20, table.current.seqno)
    point = rollback_point(start, snapshot_start, snapshot_end, versions, table, high)
    if point is None:
        assert start == 0 or common_seqno(versions, table, high) is not None
        return
    assert 0 <= point < start
    left = tuple(version for version in versions if version.seqno <= point)
    again = rollback_point(point, point, point, left, table, high)
    assert again is None or again < point
