"""The simulator says what it reached: the names of transitions and errors that it records are those of the tables."""

from __future__ import annotations

import pytest
from sim import coverage
from sim.kinds import run_seed
from sim.reduction import Part
from sim.scenario import Size
from sim.simulate import exit_code


def test_what_a_seed_reached_is_recorded_by_the_names_of_the_tables() -> None:
    reached = run_seed(0, size=Size(2, 8, 4, 6.0), part=Part(roles=("group", "follower"))).reached
    known = {*coverage.transitions(), *(f"error {name}" for name in coverage.error_classes())}
    rows = {name for name in reached if not name.startswith("error ")}
    assert rows <= known, rows - known
    assert {name.partition(":")[0] for name in rows} == {name.partition(":")[0] for name in coverage.transitions()}
    assert {name for name in reached if name.startswith("error ")} & known


def reached_all(kind: str) -> dict[str, int]:
    """What is reached if nothing is missing."""
    names = [*coverage.transitions(), *coverage.error_classes()]
    wanted = [name for name in names if name not in coverage.reasons(kind)]
    return dict.fromkeys([*wanted, *(f"error {name}" for name in wanted)], 1)


def test_what_is_not_reached_is_reported() -> None:
    reached = reached_all("embedded")
    row = coverage.transitions()[0]
    del reached[row], reached["error ProducerFenced"]
    reached["error UnknownOption"] = 1
    faults = dict.fromkeys(coverage.FAULTS["embedded"] - {"power loss"}, 1_000)
    found = coverage.report("embedded", faults, reached, coverage.COMPLETE_SEEDS)
    assert found["missing"] == [row, "ProducerFenced", "power loss"]
    assert found["reasons_refuted"] == ["UnknownOption"]
    assert found["rare_faults"] == {"power loss": 0}


@pytest.mark.parametrize("kind", ["embedded", "cluster", "shards"])
def test_many_seeds_have_to_reach_everything(kind: str) -> None:
    def code(fault: int, seeds: int) -> int:
        faults = dict.fromkeys(coverage.FAULTS[kind], fault)
        figures = {"seeds": seeds, "findings": 0, "coverage": coverage.report(kind, faults, reached_all(kind), seeds)}
        return exit_code(figures)

    assert code(1_000, 10_000) == 0
    assert code(999, 10_000) == 1
    assert code(999, 9_999) == 0
    assert code(999, 20_000) == 1
    assert exit_code({"seeds": 1, "findings": 1, "coverage": {"missing": []}}) == 1


def test_each_reason_is_for_something_of_the_tables() -> None:
    known = {*coverage.error_classes(), *coverage.transitions()}
    assert {name for table in coverage.NOT_REACHED.values() for name in table} <= known
    assert coverage.NOT_REACHED.keys() == {"every kind", *coverage.FAULTS}
