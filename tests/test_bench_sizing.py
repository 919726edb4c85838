"""The figures of docs/sizing.md: the page shows what was accepted, and what does not depend on the machine holds."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from bench import figures_sizing, harness, sizing_table
from bench.fresh import fresh
from bench.sizing_table import BEGIN, BOUNDS, BYTES, END, IN_FLIGHT
from txnbuffer.config import Config

ACCEPTED = sizing_table.accepted()


def test_page_shows_the_accepted_figures() -> None:
    described, accepted = sizing_table.accepted()
    assert {*accepted} == {one.name for one in harness.figures("sizing.")}
    page = sizing_table.PAGE.read_text()
    for section, text in sizing_table.sections(described, accepted).items():
        assert BEGIN.format(section) + text + END.format(section) in page, f"run {sizing_table.ACCEPT}"


def test_accepted_figures_are_plausible() -> None:
    """A figure of memory below 0 is noise; the bytes of the values are on the disk."""
    accepted = sizing_table.accepted()[1]
    assert [name for name, value in accepted.items() if value <= 0 and "descriptors" not in name] == []
    for name, value in accepted.items():
        if found := re.fullmatch(r"sizing\.disk\.\d+\.(\d+)\.(\d+)", name):
            assert value > int(found[1]) * int(found[2])


@pytest.mark.parametrize("in_flight", [1, 64])
def test_transactions_take_the_accepted_disk(in_flight: int) -> None:
    accepted = sizing_table.accepted()[1][f"sizing.disk.{in_flight}.1.100"]
    assert figures_sizing.disk_bytes(in_flight, 1, 100) == pytest.approx(accepted, rel=0.1)


@pytest.mark.parametrize("way", sizing_table.WAYS)
def test_transactions_in_flight_share_a_sync(way: str) -> None:
    found = fresh("bench.figures_sizing", "loads", way, 0.05)
    assert {*found} == {f"{in_flight}.{size}" for in_flight in IN_FLIGHT for size in BYTES}
    one, many = found["1.100"], found["64.100"]
    assert min(*one.values(), *many.values()) > 0
    assert 0.9 < one["syncs"] < 2
    assert many["syncs"] < 0.5


def test_memory_and_recovery_are_measured() -> None:
    assert figures_sizing.of_a_program() > 1_000_000
    assert figures_sizing.recovery_seconds(5_000) > 0
    assert {*figures_sizing.THINGS} < {*sizing_table.THINGS}
    assert {*sizing_table.USE} < {*sizing_table.THINGS}


def test_memory_of_a_thing_is_what_the_process_grows_by(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([(1000, 10), (3000, 30), (1000, 10), (999, 10)])
    monkeypatch.setattr(figures_sizing, "used", lambda _: next(found))
    monkeypatch.setattr(figures_sizing, "TOPICS", 10)
    monkeypatch.setattr(figures_sizing, "QUIET", 0.0)
    assert asyncio.run(figures_sizing.grown("memory:", 0, figures_sizing.topics)) == (200, 2)
    with pytest.raises(RuntimeError, match="measure more of them"):
        asyncio.run(figures_sizing.grown("memory:", 0, figures_sizing.topics))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sizing_table, "TABLE", tmp_path / "sizing.toml")
    monkeypatch.setattr(sizing_table, "PAGE", tmp_path / "page.md")
    names = sizing_table.sections(*ACCEPTED)
    text = "".join(f"{BEGIN.format(name)}old {name}\n{END.format(name)}" for name in names)
    sizing_table.PAGE.write_text(f"before\n{text}after\n")
    return tmp_path


def test_figures_are_written_to_file_and_page_together(files: Path) -> None:
    values = ACCEPTED[1]
    sizing_table.write(values)
    assert sizing_table.accepted()[1] == values
    text = sizing_table.PAGE.read_text()
    assert "old" not in text.replace("hold", "")
    assert "| `file` | 64 | 100 |" in text
    assert text.endswith("after\n")
    with pytest.raises(ValueError, match=r"sizing\.disk\.1\.1\.100.* not measured"):
        sizing_table.write({name: value for name, value in values.items() if name != "sizing.disk.1.1.100"})
    assert sizing_table.accepted()[1] == values


def test_settings_that_bound_something_exist() -> None:
    for name in BOUNDS:
        section, key = name.split(".")
        assert hasattr(getattr(Config(), section), key), name
