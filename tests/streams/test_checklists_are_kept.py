"""Every row of the checklists of mutations, streams and replication has the tests that it names, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from source_tree import ROOT

TESTS = ROOT / "tests"


def names_in(*patterns: str) -> set[str]:
    """The tests in these files."""
    return {
        name
        for pattern in patterns
        for path in TESTS.glob(pattern)
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


NAMES = names_in("mutations/test_*.py", "streams/test_*.py", "service/test_*.py")
OF_PAIRS = ("pair/test_checklist_pair.py", "service/test_checklist_pair_services.py")


def numbers_of(name: str) -> set[int]:
    """The rows that a test names: `test_row_12_…`, `test_rows_14_to_18_…`, `test_rows_9_and_11_…`."""
    found = re.match(r"test_rows?_(\d+)(?:_(to|and)_(\d+))?(?:_|$)", name)
    if found is None:
        return set()
    first, between, last = found.groups()
    if between == "to":
        return set(range(int(first), int(last) + 1))
    return {int(first), int(last or first)}


SHOWN = set().union(*map(numbers_of, NAMES - names_in(*OF_PAIRS)))


def rows(path: Path) -> list[tuple[list[int], str]]:
    """Numbers and text of each row."""
    found = []
    for line in path.read_text().splitlines():
        if cell := re.match(r"\| ([\d, –]+) \|", line):
            numbers: list[int] = []
            for part in cell.group(1).split(","):
                first, _, last = part.partition("–")
                numbers += range(int(first), int(last or first) + 1)
            found.append((numbers, line))
    return found


BOTH = [(path, *row) for path in sorted(TESTS.glob("*s/CHECKLIST.md")) for row in rows(path)]


def test_all_62_behaviours_are_listed() -> None:
    assert {number for _, numbers, _ in BOTH for number in numbers} == set(range(1, 63))


@pytest.mark.parametrize(("path", "numbers", "line"), BOTH, ids=lambda value: str(value)[:20])
def test_a_row_that_applies_has_tests(path: Path, numbers: list[int], line: str) -> None:
    _, _, _, where, why, _ = (cell.strip() for cell in line.split("|"))
    if where == "–":
        assert why, f"{path}: {line}"
    else:
        assert set(numbers) <= SHOWN, f"{path}: {line}"


def test_named_tests_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (TESTS / "streams" / "CHECKLIST.md").read_text()))
    assert len(named) > 10
    assert named - NAMES == set()


REPLICATION = rows(TESTS / "replication" / "CHECKLIST.md")


def test_all_40_behaviours_of_replication_are_listed_once() -> None:
    assert sorted(number for numbers, _ in REPLICATION for number in numbers) == [*range(1, 41)]


@pytest.mark.parametrize(("numbers", "line"), REPLICATION, ids=lambda value: str(value)[:20])
def test_a_row_of_replication_has_tests(numbers: list[int], line: str) -> None:
    _, _, _, where, why, _ = (cell.strip() for cell in line.split("|"))
    if where == "–":
        assert why, line
        return
    for path in OF_PAIRS:
        if Path(path).name in where:
            assert set(numbers) <= set().union(*map(numbers_of, names_in(path))), line
    named = set(re.findall(r"`(test_\w+)`", where))
    assert named or "test_checklist_pair" in where, line
    assert named <= names_in("pair/test_*.py", "replication/test_*.py", "service/test_*.py"), line
