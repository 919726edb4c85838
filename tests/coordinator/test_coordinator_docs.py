"""The tables of the documentation are those of the code and of the tests."""

from __future__ import annotations

from pathlib import Path

from coordinator_races import race_table

from txnbuffer.coordinator.groups import group_state_table
from txnbuffer.coordinator.messages import state_table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "coordinator.md"


def test_state_table() -> None:
    assert state_table() in DOCS.read_text()


def test_race_table() -> None:
    assert race_table() in DOCS.read_text()


def test_table_of_groups() -> None:
    assert group_state_table() in (DOCS.parent / "groups.md").read_text()
