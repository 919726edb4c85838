"""Output of commands: tables for people, or JSON with stable names"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import click

Row: TypeAlias = Mapping[str, Any]

MESSAGES = logging.getLogger("txnbuffer.messages")

CELL_WIDTH = 200
"""Maximum characters of a table cell on a terminal; what other programs read is never cut."""
SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
LONE_BYTES = 0xDC00
"""The code point of byte 0 when Python decodes bytes that are not UTF-8 with surrogateescape."""
UNFOLDED_WIDTH = 1_000_000
"""Width of tables outside a terminal: each row stays on one line, for grep and similar tools."""

output_option = click.option(
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)


def show_rows(rows: Sequence[Row], output: str, *, title: str = "", empty: str = "nothing found") -> None:
    """Print rows with the same keys, as a table or a JSON array."""
    if output == "json":
        click.echo(json.dumps([plain(row) for row in rows]))
    elif not rows:
        click.echo(f"{title}: {empty}" if title else empty)
    else:
        _print_table(rows, title)


def show_record(record: Row, output: str, *, title: str = "") -> None:
    """Print one record, one field per line or as a JSON object."""
    if output == "json":
        click.echo(json.dumps(plain(record)))
        return
    if title:
        click.echo(title)
    width = max(map(len, record), default=0)
    for name, value in record.items():
        click.echo(f"  {name:<{width}}  {_cell(value)}")


def show_line(record: Row) -> None:
    """Print one JSON object on one line and flush it."""
    click.echo(json.dumps(plain(record)))
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """A value for JSON: ids, positions and bytes become text.

    A field of bytes that are not UTF-8 becomes `<field>_base64`, as `txnbuf produce --json` accepts it.
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
    r"""Bytes as one printable line for a table; different bytes give different lines.

    Printable UTF-8 stays as it is, all else becomes `\n`, `\t`, `\r`, `\xff` (a byte) or `\u0085` (a character),
    and the backslash is doubled. `taken` is a text with another meaning in this place; equal bytes are escaped.
    """
    line = printable(data.decode(errors="surrogateescape").replace("\\", "\\\\"))
    return f"\\x{ord(line[0]):02x}{line[1:]}" if line and line == taken else line


def printable(line: str) -> str:
    """A text whose unprintable characters are escaped; the backslash stays as it is."""
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


def has_style() -> bool:
    """Whether output may be bold or coloured: not if `NO_COLOR` is set, which also says no to bold."""
    return not os.environ.get("NO_COLOR")


def narrate(line: str) -> None:
    """Print a message to stderr, for the person at the terminal; `txnbuf -q` leaves it out."""
    MESSAGES.info("%s", line)


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
    return line if len(line) <= CELL_WIDTH or not sys.stdout.isatty() else line[: CELL_WIDTH - 1] + "…"


def _print_table(rows: Sequence[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    console = Console(
        width=None if terminal else UNFOLDED_WIDTH,
        soft_wrap=not terminal,
        markup=False,
        highlight=False,
        color_system="auto" if has_style() else None,
    )
    if title:
        console.print(title, style="italic")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, value in rows[0].items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()), style=None)
    console.print(table)
