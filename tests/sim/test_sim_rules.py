"""The rules of roles: each accepts a history that is right, and names one that is wrong, in each way it can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from sim.branch_apps import BranchCommit
from sim.copy_apps import Rows
from sim.history import Attempt, Fate, Shown
from sim.readers import Slice, Stretch
from sim.rules_roles import branched, each_once, fenced, relayed, sliced, stored, stretched

from txnbuffer.model import Position

KEYS = (b"k", b"l", b"k", b"m")
LOG = [Shown(number, key, b"%d" % number, Position(1, number)) for number, key in enumerate(KEYS, 1)]
"""Four records; the third replaces the first."""
CHANGES = [record._replace(position=None) for record in LOG]
"""The same as change streams show them."""
OTHER = b"other"


def text(found: Iterable[str]) -> str:
    return "\n".join(found)


# Relays


@pytest.mark.parametrize(("target", "trimmed"), [(LOG, False), (LOG, True), (LOG[2:], True), ([], True)])
def test_a_relay_that_copies_the_records_is_right(target: list[Shown], trimmed: bool) -> None:
    moved = [record._replace(seqno=None, position=Position(9, at)) for at, record in enumerate(target)]
    assert text(relayed(LOG, moved, trimmed=trimmed)) == ""


@pytest.mark.parametrize(
    ("target", "trimmed", "number"),
    [
        (LOG[:3], False, 4),
        (LOG[1:], False, 1),
        ([*LOG, LOG[3]], False, 5),
        ([LOG[0], LOG[2], LOG[1], LOG[3]], False, 2),
        ([*LOG[:3], LOG[3]._replace(value=OTHER)], False, 4),
        ([*LOG[:3], LOG[3]._replace(key=b"k")], False, 4),
        ([*LOG, LOG[3]], True, 5),
        (LOG[:3], True, 1),
        ([LOG[1], LOG[3]], True, 1),
    ],
    ids=["short", "late", "twice", "order", "value", "key", "twice, trimmed", "end, trimmed", "gap, trimmed"],
)
def test_a_relay_that_copies_something_else_is_found(target: list[Shown], trimmed: bool, number: int) -> None:
    found = text(relayed(LOG, target, trimmed=trimmed))
    assert f"a relay wrote {len(target)} records" in found
    assert f"no. {number} is " in found


# Sinks


def rows(seqno: int, *stored_rows: Shown, complete: bool = True) -> Rows:
    return Rows("sink", "a", seqno, complete, {row.key: row for row in stored_rows})


@pytest.mark.parametrize(
    "right",
    [
        rows(0),
        rows(2, CHANGES[0], CHANGES[1]),
        rows(4, CHANGES[1], CHANGES[2], CHANGES[3]),
        rows(3, CHANGES[2], complete=False),
    ],
    ids=["empty", "two", "replaced", "incomplete"],
)
def test_a_sink_that_stores_the_newest_changes_is_right(right: Rows) -> None:
    assert text(stored(right, LOG)) == ""


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (rows(2, CHANGES[0]), "b'l': (None, "),
        (rows(3, CHANGES[0], CHANGES[1]), "b'k': "),
        (rows(1, CHANGES[0], CHANGES[3]), "b'm': "),
        (rows(1, CHANGES[0]._replace(value=OTHER)), "b'k': "),
        (rows(1, CHANGES[0]._replace(seqno=2)), "b'k': "),
        (rows(5, CHANGES[1], CHANGES[2], CHANGES[3]), "is at seqno 5 of a, which has 4"),
        (rows(5, complete=False), "is at seqno 5 of a, which has 4"),
    ],
    ids=["row lacks", "old row", "row too many", "value", "number", "too far", "too far, incomplete"],
)
def test_a_sink_that_stores_something_else_is_found(wrong: Rows, part: str) -> None:
    assert part in text(stored(wrong, LOG))


@pytest.mark.parametrize("given", [[], CHANGES, CHANGES[1:3], [CHANGES[0], CHANGES[3]]])
def test_a_sink_that_is_given_changes_of_the_log_is_right(given: list[Shown]) -> None:
    assert text(each_once("sink", given, LOG)) == ""


@pytest.mark.parametrize(
    ("change", "is_there"),
    [
        (CHANGES[1]._replace(value=OTHER), "seqno 2 is Shown("),
        (CHANGES[1]._replace(key=b"k"), "seqno 2 is Shown("),
        (CHANGES[1]._replace(seqno=5), "seqno 5 is None"),
        (CHANGES[1]._replace(seqno=0), "seqno 0 is None"),
        (CHANGES[1]._replace(seqno=None), "seqno 0 is None"),
    ],
    ids=["value", "key", "too far", "zero", "no number"],
)
def test_a_sink_that_is_given_something_else_is_found(change: Shown, is_there: str) -> None:
    assert is_there in text(each_once("sink", [CHANGES[0], change], LOG))


@pytest.mark.parametrize("given", [[CHANGES[1], CHANGES[1]], [CHANGES[2], CHANGES[1]]], ids=["twice", "order"])
def test_a_sink_that_is_given_a_change_again_is_found(given: list[Shown]) -> None:
    assert "after seqno" in text(each_once("sink", given, LOG))


# Streams that begin in the middle


def stretch(start: int, seqno: int, *changes: Shown, **options: Any) -> Stretch:
    return Stretch("joiner", "a", start, options.pop("to", None), seqno, changes=dict(numbered(changes)), **options)


def numbered(changes: Iterable[Shown]) -> Iterable[tuple[int, Shown]]:
    return ((change.seqno or 0, change) for change in changes)


@pytest.mark.parametrize(
    "right",
    [
        stretch(2, 2, complete=True),
        stretch(1, 4, *CHANGES[1:], complete=True),
        stretch(0, 4, *CHANGES[1:], complete=True),
        stretch(0, 2, CHANGES[1]),
        stretch(1, 4, *CHANGES[1:], complete=True, to=4, ended=True),
        stretch(1, 3, *CHANGES[1:3], complete=True, to=4),
    ],
    ids=["empty", "all", "replaced", "incomplete", "ended", "not ended"],
)
def test_a_stream_from_the_middle_that_shows_the_changes_is_right(right: Stretch) -> None:
    assert text(stretched(right, LOG)) == ""


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (stretch(1, 2, CHANGES[1]._replace(value=OTHER)), "and seqno 2 is Shown("),
        (stretch(1, 5, CHANGES[1]._replace(seqno=5)), "and seqno 5 is None"),
        (stretch(1, 3, CHANGES[1], complete=True), "lacks {b'k': "),
        (stretch(2, 4, *CHANGES[1:], complete=True), "lacks {}, has too much {b'l': "),
        (stretch(0, 2, *CHANGES[:3], complete=True), "too much"),
        (stretch(1, 3, *CHANGES[1:3], to=4, ended=True), "ended at 3, before 4"),
        (stretch(1, 5, *CHANGES[1:], complete=True), "is at seqno 5 of a, which has 4"),
    ],
    ids=["value", "too far", "change lacks", "before its start", "after its end", "ends early", "end too far"],
)
def test_a_stream_from_the_middle_that_shows_something_else_is_found(wrong: Stretch, part: str) -> None:
    assert part in text(stretched(wrong, LOG))


# Readers that begin in the middle


def nothing(record: Shown) -> bool:
    """What a reader may miss where nothing is compacted."""
    return False


def sent(record: Shown) -> float:
    """Each record was sent at the time of its number."""
    return float(record.position.entry if record.position else 0)


def part_of_log(opened: float, first: Position | None, *found: Shown) -> Slice:
    return Slice("reader", "a", opened, first, [*found])


@pytest.mark.parametrize(
    "right",
    [
        part_of_log(0.0, Position(1, 2), *LOG[1:]),
        part_of_log(0.0, Position(1, 2), LOG[1]),
        part_of_log(0.0, Position(1, 2)),
        part_of_log(2.0, None, *LOG[2:]),
        part_of_log(2.0, None, *LOG[1:]),
        part_of_log(2.0, None),
        part_of_log(0.0, Position(1, 2), *(record._replace(seqno=None) for record in LOG[1:])),
    ],
    ids=["position", "prefix", "nothing yet", "end", "sent before", "nothing at the end", "without numbers"],
)
def test_a_reader_from_the_middle_that_shows_all_from_there_is_right(right: Slice) -> None:
    assert text(sliced(right, LOG, sent, nothing)) == ""


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (part_of_log(0.0, Position(1, 2), *LOG[2:]), "was shown"),
        (part_of_log(0.0, Position(1, 2), *LOG), "was shown"),
        (part_of_log(0.0, Position(1, 2), LOG[1], LOG[3]), "was shown"),
        (part_of_log(0.0, Position(1, 2), LOG[2], LOG[1]), "was shown"),
        (part_of_log(0.0, Position(1, 2), LOG[1]._replace(value=OTHER)), "was shown"),
        (part_of_log(0.0, Position(1, 9), LOG[0]), "was shown"),
        (part_of_log(2.0, None, LOG[3]), "was not shown"),
        (part_of_log(2.0, None, LOG[2]._replace(value=OTHER)), "was shown"),
        (part_of_log(2.0, None, *LOG[2:], LOG[3]), "was shown"),
    ],
    ids=["late", "early", "gap", "order", "value", "beyond", "end, late", "end, value", "end, twice"],
)
def test_a_reader_from_the_middle_that_shows_something_else_is_found(wrong: Slice, part: str) -> None:
    assert part in text(sliced(wrong, LOG, sent, nothing))


# Rivals


def attempt(client: str, number: int, fate: Fate, *values: bytes) -> Attempt:
    return Attempt(client, {"a": [*values]}, producer=(client, number), fate=fate)


NUMBERED = [
    attempt("x", 1, Fate.COMMITTED, b"1"),
    attempt("y", 2, Fate.ABORTED, b"other"),
    attempt("x", 2, Fate.ASKED, b"2"),
    attempt("y", 3, Fate.COMMITTED, b"3"),
    attempt("x", 4, Fate.OPEN, b"never"),
]


def test_rivals_that_commit_one_after_another_are_right() -> None:
    assert text(fenced(NUMBERED, {"a": LOG[:3]}, 3)) == ""
    assert text(fenced([], {"a": []}, 0)) == ""


@pytest.mark.parametrize(
    ("more", "log", "committed", "part"),
    [
        ([], LOG[:2], 2, "no. 3 (committed) committed, and none of its records is visible"),
        ([attempt("y", 2, Fate.ASKED, b"4")], LOG, 3, "['x', 'y'] have all committed no. 2"),
        ([], [LOG[0], LOG[2]], 3, "the numbers [1, 3] are visible, and the newest committed one is 3"),
        ([], [LOG[0], LOG[2]], 2, "the numbers [1, 3] are visible, and the newest committed one is 2"),
        ([], LOG[:3], 2, "the numbers [1, 2, 3] are visible, and the newest committed one is 2"),
        ([], LOG[:3], 4, "the numbers [1, 2, 3] are visible, and the newest committed one is 4"),
    ],
    ids=["lost", "two instances", "gap", "gap, none missing", "too few committed", "too many committed"],
)
def test_rivals_that_break_their_order_are_found(
    more: list[Attempt], log: list[Shown], committed: int, part: str
) -> None:
    assert part in text(fenced([*NUMBERED, *more], {"a": log}, committed))


# Branches

FIRST, SECOND, LATE = (Attempt("x", {"a": values}) for values in ([b"1", b"2"], [b"3"], [b"4"]))
"""Two branches that have committed together, and one that has not."""


def commits(*named: tuple[Fate, Attempt, Attempt]) -> list[BranchCommit]:
    """Commits of number 1, and one of number 2 that has committed."""
    asked = [BranchCommit(1, (first, second), fate) for fate, first, second in named]
    return [*asked, BranchCommit(2, (Attempt("x", {"a": [b"5"]}),), Fate.COMMITTED)]


def log_of(*values: bytes) -> dict[str, list[Shown]]:
    return {"a": [Shown(None, None, value) for value in (*values, b"5")]}


WHOLE = (b"1", b"3", b"2")
ASKED, COMMITTED, ABORTED = Fate.ASKED, Fate.COMMITTED, Fate.ABORTED


@pytest.mark.parametrize(
    ("named", "values", "last"),
    [
        ([(COMMITTED, FIRST, SECOND)], WHOLE, 2),
        ([(ASKED, FIRST, SECOND)], WHOLE, 2),
        ([(ASKED, FIRST, SECOND)], (), 0),
        ([(ASKED, FIRST, LATE), (COMMITTED, FIRST, SECOND)], WHOLE, 2),
        ([(ABORTED, FIRST, LATE), (ASKED, FIRST, SECOND)], WHOLE, 2),
        ([(ABORTED, FIRST, LATE)], (), 0),
    ],
    ids=["committed", "asked", "asked, not committed", "asked before", "aborted before", "aborted"],
)
def test_a_number_that_commits_the_branches_of_one_commit_is_right(
    named: list[tuple[Fate, Attempt, Attempt]], values: tuple[bytes, ...], last: int
) -> None:
    assert text(branched(commits(*named), last, log_of(*values))) == ""


@pytest.mark.parametrize(
    ("named", "values", "last"),
    [
        ([(COMMITTED, FIRST, SECOND)], (), 0),
        ([(COMMITTED, FIRST, SECOND)], (b"1", b"2"), 0),
        ([(ASKED, FIRST, SECOND)], (b"3",), 0),
        ([(ASKED, FIRST, SECOND)], (), 1),
        ([(ABORTED, FIRST, SECOND)], WHOLE, 0),
        ([(ASKED, FIRST, LATE), (COMMITTED, FIRST, SECOND)], (b"1", b"2", b"4"), 0),
        ([(ASKED, FIRST, LATE), (ASKED, FIRST, SECOND)], (*WHOLE, b"4"), 0),
    ],
    ids=["lost", "committed, one lost", "asked, one lost", "known, lost", "aborted", "those of another commit", "both"],
)
def test_a_number_that_commits_other_branches_is_found(
    named: list[tuple[Fate, Attempt, Attempt]], values: tuple[bytes, ...], last: int
) -> None:
    found = text(branched(commits(*named), last, log_of(*values)))
    assert "of no. 1 are visible, and its commits named" in found
    assert "no. 2" not in found
