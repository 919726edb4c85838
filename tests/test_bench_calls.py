"""The counted figures: each kind of work costs what was accepted, and the table says when that has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import calls_table, harness
from bench.figures_calls import KINDS
from bench.fresh import fresh

ROW = {"python": 1000.0, "syncs": 2.0, "iterations": 4.0}


@pytest.mark.parametrize("work", KINDS)
def test_work_costs_what_was_accepted(work: str) -> None:
    """Calls are those of the Python of the table; other versions are held to what does not depend on them."""
    kind, found = KINDS[work], fresh("bench.figures_calls", "count", work)
    if sys.version_info[:2] != calls_table.PYTHON:
        found = {name: found[name] for name in calls_table.FOR_ALL_VERSIONS if name in found}
    row = calls_table.accepted()[work]
    wrong = [*calls_table.problems(work, found, row, kind.in_flight, kind.spread)]
    assert not wrong, "\n".join(wrong)


def test_table_has_all_figures_and_the_page_shows_it() -> None:
    table = calls_table.accepted()
    assert {work: {*row} for work, row in table.items()} == {work: {*kind.counted} for work, kind in KINDS.items()}
    assert calls_table.BEGIN + calls_table.page_table(table) + calls_table.END in calls_table.PAGE.read_text()


def problems(**found: float) -> list[str]:
    return [*calls_table.problems("transaction", ROW | found, ROW)]


def test_figures_that_vary_a_little_pass() -> None:
    assert problems(python=1029.0, syncs=2.5, iterations=5.6) == []
    assert problems(python=901.0, syncs=1.55, iterations=2.5) == []


def test_a_longer_path_is_refused_with_figure_and_remedy() -> None:
    (text,) = problems(python=1080.0)
    assert text.startswith("calls.transaction.python is 1080, which is 8% above the accepted 1000: ")
    assert "make bench ONLY=calls ARGS=--accept" in text
    assert len(problems(syncs=3.0)) == len(problems(iterations=6.0)) == 1


def test_a_gain_must_be_accepted() -> None:
    (text,) = problems(python=800.0)
    assert text.startswith("calls.transaction.python is 800, which is 20% below the accepted 1000: accept it")
    assert len(problems(syncs=1.0)) == len(problems(iterations=1.0)) == 1


def test_a_figure_that_was_never_accepted_is_refused() -> None:
    (text,) = problems(frames=4.0)
    assert text.startswith("calls.transaction.frames is 4, and nothing is accepted yet")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calls_table, "TABLE", tmp_path / "calls.toml")
    monkeypatch.setattr(calls_table, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(calls_table, "PYTHON", sys.version_info[:2])
    calls_table.PAGE.write_text(f"before\n{calls_table.BEGIN}old\n{calls_table.END}after\n")
    return tmp_path


def test_accepted_figures_are_written_to_table_and_page(files: Path) -> None:
    calls_table.write(["one", "two.64"], {"calls.two.64.python": 1234.5, "calls.one.syncs": 2.0})
    calls_table.write(["one", "two.64"], {"calls.one.syncs": 1.0})
    assert calls_table.accepted() == {"one": {"syncs": 1.0}, "two.64": {"python": 1234.5}}
    text = calls_table.PAGE.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `two.64` | 1,234 |" in text
    calls_table.write(["one"], {})
    assert calls_table.accepted() == {"one": {"syncs": 1.0}}


def test_counts_of_another_python_are_not_accepted(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_table, "PYTHON", (3, 10))
    with pytest.raises(ValueError, match=r"Python 3\.10"):
        calls_table.write(["one"], {"calls.one.syncs": 2.0})


def test_values_are_accepted_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, float]] = []
    monkeypatch.setattr(harness, "_accepting", {"calls.": lambda values: written.append(dict(values))})
    chosen = [harness.Figure(name, "calls", None, None, lambda: 2.0) for name in ("calls.one.c", "other")]
    with open(os.devnull, "w") as nowhere:
        assert harness.run(chosen, runs=1, out=nowhere, err=nowhere)
        assert written == []
        assert harness.run(chosen, runs=1, out=nowhere, err=nowhere, accept=True)
    assert written == [{"calls.one.c": 2.0}]


COUNTED = """
import asyncio, json, os, sys, threading
from bench.counts import ROUNDS, Counts
from broker_io.system import SystemDisk

counts = Counts()
def called(): len("")
async def work():
    for _ in range(5):
        called()
    await asyncio.sleep(0)
    file = SystemDisk().open(sys.argv[1], write=True, create=True)
    file.write(0, [b"x"])
    file.sync()
    file.sync()
    file.close()
async def main():
    for number in range(ROUNDS + 2):
        counts.round(number)
        await work()
    counts.end()
asyncio.run(main())
print(json.dumps(counts.results(1)))
"""


def test_calls_syncs_and_iterations_are_counted(tmp_path: Path) -> None:
    """A sync without a write before it does not count."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["syncs"], found["iterations"], found["frames"]) == (1.0, 1.0, 0.0)
    assert 12 <= found["python"] <= 40
    assert found["c"] >= 5
    assert (found["modules"], done.stderr) == (1, "")
