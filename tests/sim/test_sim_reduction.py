"""Failing seeds are reduced: to what is needed for the same failure, and to a command that runs it."""

from __future__ import annotations

import argparse
import re
import shlex
import tempfile
from pathlib import Path

import pytest
from mutants.run import copy_tree
from sim import planted, simulate
from sim.kinds import run_seed
from sim.reduction import Part, reduced, rules
from sim.scheduler import Livelock

WHOLE = Part((0, 1, 2, 3, 4, 5), ("group", "late reader"), (0, 1), 15, 10.0)


def test_a_part_is_written_as_a_text() -> None:
    text = "faults=0,1,2,3,4,5;roles=group,late reader;writers=0,1;transactions=15;seconds=10"
    assert str(WHOLE) == text
    assert Part.of(text) == WHOLE
    assert Part.of("faults=;seconds=2.5") == Part(faults=(), seconds=2.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sizes=3", "no 'sizes': give faults, roles"),
        ("faults=0,x", "faults of a part of a seed must be numbers, got '0,x'"),
        ("roles=reader,nobody", "no role is named 'nobody'; the roles are reader"),
    ],
)
def test_an_option_that_names_no_part_is_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        simulate.part_of(text)


def test_a_replay_in_which_the_simulator_fails_has_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Livelock("for ever")

    monkeypatch.setattr(simulate, "run_seed", fail)
    assert simulate.replay(7, "cluster", None) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["sim.scheduler.Livelock: for ever", "reduced: make sim SEED=7 KIND=cluster"]


def test_what_a_failure_does_not_need_is_left_out() -> None:
    def fails(part: Part) -> bool:
        return part.faults is not None and part.writers is not None and {1, 4} <= {*part.faults} and 1 in part.writers

    left = reduced(WHOLE, fails)
    assert (left.faults, left.roles, left.writers, left.transactions) == ((1, 4), (), (1,), 0)
    assert (left.seconds or 9.9) < 2.0


def test_a_reduction_takes_a_limited_number_of_runs() -> None:
    runs: list[Part] = []
    assert reduced(WHOLE, lambda part: bool(runs.append(part)), tries=5) == WHOLE
    assert len(runs) == 5


def test_findings_of_one_rule_are_the_same_without_names_and_numbers() -> None:
    one = "writer0's 0:4 (committed) sent {'orders': [b'writer0.1']}, and the topics have {'orders': []}"
    other = "writer1's 0:9 (committed) sent {'payments': [b'writer1.7']}, and the topics have {'payments': []}"
    assert rules(one) == rules(other) == {"sent and the topics have"}
    aborted = "writer1's 0:9 (aborted) must not be visible, and the topics have {'orders': [b'writer1.7']}"
    assert rules(aborted) == {"must not be visible, and the topics have"}
    failed = "thread main failed:\nTraceback (most recent call last):\n  File ...\nKeyError: {}"
    assert rules(failed.format(3)) == rules(failed.format(4)) == {"KeyError"}


def test_what_is_left_out_does_not_move_the_other_faults() -> None:
    def events(*faults: int) -> set[tuple[float, str]]:
        """The times and the numbers of the faults."""
        lines: list[str] = []
        run_seed(3, part=Part(faults=faults, roles=(), writers=(0,)), echo=lines.append)
        words = (line.split() for line in lines)
        return {(round(float(time), 2), number) for time, who, number, *_ in words if who == "fault"}

    assert events(2) | events(5) == events(2, 5)
    assert {number for _, number in events(2)} == {"2"}
    assert {number for _, number in events(5)} == {"5"}


@pytest.mark.timeout(280)
def test_a_seed_that_finds_a_planted_defect_is_reduced() -> None:
    (bug,) = (bug for bug in planted.load() if bug.name == "file log: an append is acknowledged before its sync")
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        bug.plant(tree)
        figures, text = planted.simulate(tree, "--seeds", 20, "--until-found", "--reduce", "--workers", 1)
        assert figures["findings"] == 1, text
        found = re.search(r"reduced: make sim SEED=(\d+) PART=(.*)", text)
        assert found is not None, text
        (part,) = shlex.split(found[2])
        left = Part.of(part)
        assert len(left.faults or ()) + len(left.roles or ()) + len(left.writers or ()) <= 4, part
        again, _ = planted.simulate(tree, "--first", found[1], "--seeds", 1, "--part", part)
        assert again["findings"] == 1
