"""The soak of tables, which `make soak` runs, detects damage."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from sinks.sink_rigs import batch, row, token
from soak_scripts import load

from txnbuffer.sinks.sqlite import SQLiteFile


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return load(Path(__file__).with_name("materialize_soak.py"))


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM departures WHERE key = 'a'",
        "DELETE FROM departures_keyless",
        "INSERT INTO departures VALUES ('b', 'x', NULL, NULL, NULL, 2, '1:2')",
        "UPDATE departures SET value = 'other'",
        "UPDATE departures SET seqno = 2",
        "UPDATE txnbuffer_topics SET seqno = 2",
        "UPDATE departures SET value = 'other'; UPDATE txnbuffer_topics SET complete = 0",
        "",
    ],
)
def test_the_soak_detects_damage(soak: ModuleType, tmp_path: Path, damage: str) -> None:
    flights = {"departures": [soak.Flight(None, "k", None), soak.Flight("b", "x", None), soak.Flight("b", None, None)]}
    flights["departures"].append(soak.Flight("a", "y", None))
    path = tmp_path / "flights.db"
    with SQLiteFile(path) as file:
        table = file.table("departures")
        table.begin()
        rows = [row(1, None, "k"), row(2, "b", "x"), row(3, "b", None), row(4, "a", "y")]
        table.write([batch(token(4), *rows)])
    with closing(sqlite3.connect(path)) as database:
        database.executescript(damage)
    report = soak.Report(0)
    soak.look(path, flights, report)
    assert bool(report.wrong) == bool(damage)
