"""What `make size` counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import size
from source_tree import Module

SOURCE = '''"""Docstring."""

import os


def one(path: str) -> bool:
    """Docstring."""
    found = os.path.exists(path)
    if found:
        print(path)
    return found
'''


def test_statements_are_those_that_run() -> None:
    assert size.size([Module("a/b.py", SOURCE)]) == (1, 11, 6)


def test_package_is_at_most_two_folders() -> None:
    assert [size.package(Module(path, "")) for path in ("a/b.py", "a/b/c.py", "a/b/c/d.py")] == ["a", "a/b", "a/b"]


def test_seconds_of_a_run_are_printed_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "SECONDS", tmp_path / "seconds")
    runs = [
        ("tests/test_a.py::test_b", 1.0),
        ("tests/x/test_c.py::test_d[1]", 4.0),
        ("tests/x/test_c.py::test_d[2]", 3.0),
    ]
    size.record(
        pytest.TestReport(name, (name, 0, ""), {}, "passed", None, "call", duration=seconds) for name, seconds in runs
    )
    assert [line.split() for line in [*size.report()][-3:]] == [
        ["seconds", "of", "tests:", "8"],
        ["tests/x", "7"],
        ["tests", "1"],
    ]
