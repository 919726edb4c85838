"""The tables of the documentation are those of the code and of the tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from coordinator.coordinator_races import race_table

from txnbuffer.coordinator import groups, messages

DOCS = Path(__file__).resolve().parents[2] / "docs" / "coordinator.md"


def markdown(columns: str, transitions: Iterable[messages.StateTransition | groups.StageTransition]) -> str:
    """A state table in Markdown."""
    rows = [f"| {before.name} | {event} | {after.name} |" for before, event, after in transitions]
    return "\n".join([columns, "|---|---|---|", *rows])


def test_state_table() -> None:
    assert markdown("| state | event | next state |", messages.TRANSITIONS) in DOCS.read_text()


def test_race_table() -> None:
    assert race_table() in DOCS.read_text()


def test_table_of_groups() -> None:
    assert markdown("| group | event | next |", groups.TRANSITIONS) in (DOCS.parent / "group-assignment.md").read_text()
