"""The simulator finds bugs that are planted in the product: some here, all of them with `make sim-planted`."""

from __future__ import annotations

import pytest
from mutants import run
from sim.planted import Planted, Results, find, load
from source_tree import ROOT

PLANTED = load()
SEEDS = 20
"""At most so many seeds find a fast one."""


def test_each_bug_can_be_planted() -> None:
    assert [(bug.name, found) for bug in PLANTED if (found := bug.problems())] == []


def test_each_bug_is_listed_once_and_has_no_unit_test() -> None:
    names = [bug.name for bug in PLANTED]
    assert len(names) == len(set(names))
    changed = {run.digest_of_code(one.changed(ROOT).encode()): bug for bug in PLANTED for one in bug.places}
    files = {one.file for bug in PLANTED for one in bug.places}
    modules = [module for module in (mutant.planted() for mutant in run.load()) if module.path in files]
    known = {digest for module in modules if (digest := run.digest_of_code(module.text.encode())) in changed}
    assert [changed[digest].name for digest in known if not changed[digest].commit] == []


def test_each_bug_was_found() -> None:
    results = Results().by_name
    assert [bug.name for bug in PLANTED if bug.name not in results or results[bug.name].seed < 0] == []


@pytest.mark.parametrize("bug", [bug for bug in PLANTED if bug.fast], ids=lambda bug: bug.name)
def test_a_fast_bug_is_found(bug: Planted) -> None:
    assert find(bug, seeds=SEEDS).finding
