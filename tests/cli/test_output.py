"""Tables for people: outside of a terminal a row is one line."""

from __future__ import annotations

import pytest

from txnbuffer.cli.output import show_rows


def test_a_row_is_one_line_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    names = ["topic-" + "x" * 150, "a name with spaces " * 6]
    rows = [{"topic": name.strip(), "client": name.strip(), "bytes": 1} for name in names]
    show_rows(rows, "table", title="what " * 20)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(rows)
    for row, line in zip(rows, lines[2:], strict=True):
        assert line.count(str(row["topic"])) == 2
