"""Power cuts of a program on an embedded log, and whether lost syncs and early answers are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from power.cuts import CUTS, check, run_history, run_life
from power.facts import Facts, Found, Visible
from power.recording import Kind, Operation, Replay, compile_recorder, notes

from broker_io.errors import Damaged
from broker_io.testing import SimulatedDisk, Unsynced

SEEDS = 3


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_power_cut_anywhere(tmp_path: Path, library: Path, seed: int) -> None:
    counts = run_history(tmp_path, library, seed, CUTS)
    assert counts.total() == CUTS


def test_a_missing_sync_of_the_journal_is_found(tmp_path: Path, library: Path) -> None:
    operations = run_life(tmp_path, library, SimulatedDisk(), 1)
    planted = [one for one in operations if one.kind is not Kind.SYNC_ENDS or "/journal" not in one.path]
    answers = [number for number, one in enumerate(planted) if b"answered" in one.data]
    replay, found = Replay(planted, SimulatedDisk()), []
    for number in answers[20:60:8]:
        known = Facts()
        known.learn(notes(planted[: number + 1]))
        try:
            check(replay.go_to(number + 1).crash(Unsynced.LOST), known, tmp_path / "cut")
        except (AssertionError, Damaged) as error:
            found.append(error)
    assert found


def test_a_sync_makes_durable_what_was_written_before_it_began() -> None:
    begins, ends = Operation(Kind.SYNC_BEGINS, 1, 0, "/a", "", b""), Operation(Kind.SYNC_ENDS, 1, 0, "/a", "", b"")
    root = Operation(Kind.OPEN_DIRECTORY, 2, 0, "/", "", b"")
    replay = Replay(
        [
            Operation(Kind.OPEN, 1, 0o102, "/a", "", b""),
            root,
            begins._replace(file=2, path="/"),
            ends._replace(file=2, path="/"),
            Operation(Kind.WRITE, 1, 0, "/a", "", b"first"),
            begins,
            Operation(Kind.WRITE, 1, 5, "/a", "", b"second"),
            ends,
        ],
        SimulatedDisk(),
    )
    durable = [replay.go_to(number).crash(Unsynced.LOST) for number in range(9)]
    assert [disk.content("/a") if disk.files() else None for disk in durable] == [*[None] * 4, *[b""] * 4, b"first"]
    assert replay.disk.content("/a") == b"firstsecond"


SENT = {"orders": ["one-0-0|a|"], "stock": ["one-0-0|a|", "one-0-0|b|"]}
WHOLE = {topic: [Visible("a", value) for value in values] for topic, values in SENT.items()}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (WHOLE, ""),
        ({}, "acknowledged"),
        ({"orders": WHOLE["orders"]}, "stock has [] of"),
        ({**WHOLE, "stock": WHOLE["stock"][:1]}, "stock has"),
        ({**WHOLE, "orders": WHOLE["orders"] * 2}, "orders has"),
        ({**WHOLE, "audit": [Visible("a", "other-0-0|a|")]}, "nobody has asked"),
        ({**WHOLE, "copies": [Visible("a", "one-0-0|b|")]}, "not the first of"),
    ],
)
def test_what_is_lost_partial_repeated_or_unasked_is_found(found: dict[str, list[Visible]], wrong: str) -> None:
    facts = Facts(asked={"one-0-0": SENT}, answered={"one-0-0"})
    sentences = [*facts.violations(Found(found, {}))]
    assert any(wrong in sentence for sentence in sentences) if wrong else not sentences


def test_gaps_and_repeats_of_numbers_are_found() -> None:
    sent = {"orders": ["one|a|"]}
    facts = Facts(asked={"one": sent}, named={"one": ("import", 2)})
    assert [*facts.violations(Found({"orders": [Visible("a", "one|a|")]}, {"import": 2}))]
