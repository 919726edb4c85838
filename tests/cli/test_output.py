"""Tables for people: outside of a terminal a row is one line, and on a terminal no line is wider than that."""

from __future__ import annotations

import pytest

from txnbuffer.cli import output
from txnbuffer.cli.admin import STREAM_COLUMNS
from txnbuffer.cli.output import show_record, show_rows


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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)


SENTENCE = "transaction 0:2: open since 1:6, of session a. Readers see all up to 1:5; `txnbuf abort 0:2` unblocks them"


@pytest.mark.usefixtures("terminal")
def test_a_narrow_table_wraps_its_texts(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"topic": "orders", "bytes": 1_234_567, "problem": SENTENCE}], "table", title="topics")
    _, header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["topic", "bytes", "problem"]
    assert lines[0].split()[:2] == ["orders", "1,234,567"]
    assert max(map(len, [header, *lines])) <= 80
    assert " ".join(" ".join(lines).split()).replace("orders 1,234,567 ", "") == SENTENCE


@pytest.mark.usefixtures("terminal")
def test_a_wide_table_lists_the_fields_of_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"peer": f"127.0.0.1:{port}", **dict.fromkeys(STREAM_COLUMNS, port), "topic": SENTENCE} for port in (1, 2)]
    show_rows(rows, "table", title="change streams")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "change streams"
    assert max(map(len, lines)) <= 80
    first, second = (lines[: lines.index("")], lines[lines.index("") + 1 :])
    for row, shown in zip(rows, (first, second), strict=True):
        assert [line.split()[0] for line in shown if not line.startswith(" " * 10)] == [*row]
        assert SENTENCE in " ".join(" ".join(shown).split())


@pytest.mark.usefixtures("terminal")
def test_a_long_field_of_a_record_is_wrapped_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show_record({"topic": "orders", "waits_for": SENTENCE * 3, "key": "x" * 300}, "table")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert SENTENCE * 3 in " ".join(" ".join(lines).split())
    assert sum(line.count("x") for line in lines if set(line.split()[-1]) == {"x"}) == 300


@pytest.mark.parametrize("text", ["t:smile:", "g:100:x", "[bold]x[/bold]"])
def test_texts_are_shown_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"group": text, "topic": "orders"}], "table", title=f"of {text}")
    show_record({"key": text}, "table")
    assert capsys.readouterr().out.count(text) == 3
