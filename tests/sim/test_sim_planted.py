"""The simulator finds bugs that are planted in the product: some here, all of them with `make sim-planted`."""

from __future__ import annotations

import pytest
from mutants import run
from sim.planted import Planted, Results, find, load

PLANTED = load()
SEEDS = 20
"""At most so many seeds find a fast one."""


def test_each_bug_can_be_planted() -> None:
    assert [(bug.name, found) for bug in PLANTED if (found := bug.problems())] == []


def test_each_bug_is_listed_once_and_has_no_unit_test() -> None:
    names = [bug.name for bug in PLANTED]
    assert len(names) == len(set(names))
    known = {(mutant.file, mutant.old, mutant.new) for mutant in run.load()}
    new = [bug for bug in PLANTED if not bug.commit]
    assert [bug.name for bug in new if {(one.file, one.old, one.new) for one in bug.places} & known] == []


def test_each_bug_was_found() -> None:
    results = Results().by_name
    assert [bug.name for bug in PLANTED if bug.name not in results or results[bug.name].seed < 0] == []


@pytest.mark.parametrize("bug", [bug for bug in PLANTED if bug.fast], ids=lambda bug: bug.name)
def test_a_fast_bug_is_found(bug: Planted) -> None:
    assert find(bug, seeds=SEEDS).finding
