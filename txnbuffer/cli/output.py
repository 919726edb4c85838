"""How results are printed: a table for people, or JSON that stays the same."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import click

Row: TypeAlias = Mapping[str, Any]

CELL_WIDTH = 200
"""Characters of a table's cell; JSON has all of them."""
SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
LONE_BYTES = 0xDC00
"""Where Python puts a byte that is no UTF-8 when it decodes with surrogateescape."""
UNFOLDED_WIDTH = 1_000_000
"""Characters of a line that no terminal shows: a row stays on one line, for grep and its kin."""

output_option = click.option(
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A table for people, or JSON for programs.",
)


def show_rows(rows: Sequence[Row], output: str, *, title: str = "", empty: str = "nothing there") -> None:
    """Print rows that share their keys: as a table, or as a JSON array."""
    if output == "json":
        click.echo(json.dumps([plain(row) for row in rows]))
    elif not rows:
        click.echo(f"{title}: {empty}" if title else empty)
    else:
        _print_table(rows, title)


def show_record(record: Row, output: str, *, title: str = "") -> None:
    """Print one thing: its fields below one another, or as a JSON object."""
    if output == "json":
        click.echo(json.dumps(plain(record)))
        return
    if title:
        click.echo(title)
    width = max(map(len, record), default=0)
    for name, value in record.items():
        click.echo(f"  {name:<{width}}  {_cell(value)}")


def show_line(record: Row) -> None:
    """Print one JSON object on a line of its own, at once."""
    click.echo(json.dumps(plain(record)))
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """A value as JSON has it: ids and positions as text, bytes as text.

    A field of bytes that are no text has another name, `<field>_base64`, as `txnbuf produce --json` takes it.
    """
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return str(value)
    if isinstance(value, Mapping):
        return dict(_field(str(name), item) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _field(name: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, bytes):
        try:
            return name, value.decode()
        except UnicodeDecodeError:
            return f"{name}_base64", base64.b64encode(value).decode()
    return name, plain(value)


def escaped(data: bytes, taken: str = "") -> str:
    r"""Bytes for a table: one printable line, which no other bytes have.

    Printable UTF-8 stands for itself, all else as `\n`, `\t`, `\r`, `\xff` (a byte) or `\u0085` (a character),
    and the backslash is doubled. `taken` is a text that means something else in this place.
    """
    line = printable(data.decode(errors="surrogateescape").replace("\\", "\\\\"))
    return f"\\x{ord(line[0]):02x}{line[1:]}" if line and line == taken else line


def printable(line: str) -> str:
    """A text with everything escaped that is not printable; the backslash stays as it is."""
    return line if line.isprintable() else "".join(map(_printable, line))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if character in SHORT:
        return SHORT[character]
    code = ord(character)
    if LONE_BYTES <= code < LONE_BYTES + 0x100:
        code -= LONE_BYTES
    elif code >= 0x80:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return f"\\x{code:02x}"


def instant(time_ms: int) -> str:
    """A time in milliseconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def narrate(line: str) -> None:
    """Say something to the person who watches."""
    click.echo(line, err=True)


def _cell(value: Any) -> str:
    if isinstance(value, bytes):
        value = escaped(value, "-")
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:,}"
    line = printable(str(value))
    return line if len(line) <= CELL_WIDTH else line[: CELL_WIDTH - 1] + "…"


def _print_table(rows: Sequence[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else UNFOLDED_WIDTH, soft_wrap=not terminal, markup=False, highlight=False)
    if title:
        console.print(title, style="italic")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, value in rows[0].items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()), style=None)
    console.print(table)
