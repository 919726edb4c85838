"""Each example has a line in their README and a test of its own."""

from __future__ import annotations

from pathlib import Path

from examples.example_process import EXAMPLES

PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_each_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in PROGRAMS if f"| [`{name}`]({name}) |" not in listed] == []
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_example_*.py"))
    assert [name for name in PROGRAMS if f'"{name}"' not in tests and f'"{name[:-3]}:app"' not in tests] == []
