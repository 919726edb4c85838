"""The simulator says what it reached: the names of transitions and errors that it records are those of the tables."""

from __future__ import annotations

from sim import coverage
from sim.reduction import Part
from sim.scenario import Size, run_seed


def test_what_a_seed_reached_is_recorded_by_the_names_of_the_tables() -> None:
    reached = run_seed(0, size=Size(2, 8, 4, 6.0), part=Part(roles=("group", "follower"))).reached
    known = {*coverage.transitions(), *(f"error {name}" for name in coverage.error_classes())}
    rows = {name for name in reached if not name.startswith("error ")}
    assert rows <= known, rows - known
    assert {name.partition(":")[0] for name in rows} == {name.partition(":")[0] for name in coverage.transitions()}
    assert {name for name in reached if name.startswith("error ")} & known


def test_what_is_not_reached_is_reported() -> None:
    rows, classes = coverage.transitions(), coverage.error_classes()
    reached = dict.fromkeys([*rows[1:], *(f"error {name}" for name in classes if name not in coverage.NOT_RAISED)], 1)
    del reached["error Fenced"]
    reached["error UnknownOption"] = 1
    found = coverage.report("embedded", dict.fromkeys(coverage.FAULTS["embedded"] - {"power loss"}, 1_000), reached)
    assert found["transitions_missing"] == rows[:1]
    assert found["errors_missing"] == ["Fenced"]
    assert found["reasons_refuted"] == ["UnknownOption"]
    assert found["faults_below_1000"] == {"power loss": 0}


def test_each_reason_is_for_a_class_of_the_tree() -> None:
    assert coverage.NOT_RAISED.keys() <= {*coverage.error_classes()}
