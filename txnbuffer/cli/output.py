"""Output of commands: tables for people, or JSON with stable names"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import click

Row: TypeAlias = Mapping[str, Any]

MESSAGES = logging.getLogger("txnbuffer.messages")

CELL_WIDTH = 200
"""Maximum characters of a table cell on a terminal; what other programs read is never cut."""
SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
LONE_BYTES = 0xDC00
"""The code point of byte 0 when Python decodes bytes that are not UTF-8 with surrogateescape."""
GAP = "  "
LEAST_TEXT = 12
"""Minimum characters of a line of a text that is wrapped: in a table with less for it, each row is a list of fields."""
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
    for line in _fields(record):
        click.echo(line)


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
    return printable(str(value))


def _cut(line: str) -> str:
    return line if len(line) <= CELL_WIDTH or terminal_width() is None else line[: CELL_WIDTH - 1] + "…"


def terminal_width() -> int | None:
    """The columns of the terminal that stdout is; None for a pipe or a file, where nothing is cut or wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _fields(record: Row) -> Iterator[str]:
    """One line for each field, or several as wide as the terminal."""
    name_width, columns = max(map(len, record), default=0), terminal_width()
    for name, value in record.items():
        lines = [_cell(value)]
        if columns is not None:
            lines = _wrapped(lines[0], max(columns - name_width - len(GAP) * 2, LEAST_TEXT))
        for line in lines:
            yield f"{GAP}{name:<{name_width}}{GAP}{line}"
            name = ""


def _wrapped(text: str, width: int) -> list[str]:
    kept = partial(textwrap.wrap, expand_tabs=False, replace_whitespace=False, drop_whitespace=False)
    return kept(text, width, break_on_hyphens=False) or [text]


class _Layout(NamedTuple):
    """How a table fits a terminal: the spaces between two columns, and the width of each column."""

    gap: int
    widths: list[int | None]

    @classmethod
    def of(
        cls, names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool], columns: int
    ) -> Self | None:
        """The layout for so many columns; None if texts would be too narrow to read. Numbers are never wrapped."""
        from rich.cells import cell_len

        whole = [max(map(cell_len, cells)) for cells in zip(names, *rows, strict=True)]
        least = [
            max(
                *map(len, _words(name)),
                *(cell_len(row[place]) if numbers[place] else min(cell_len(row[place]), LEAST_TEXT) for row in rows),
            )
            for place, name in enumerate(names)
        ]
        for gap in (len(GAP), 1):
            spare = columns - sum(least) - gap * (len(names) - 1)
            if spare >= 0:
                return cls(gap, [*_widened(least, whole, spare)])
        return None


def _words(name: str) -> list[str]:
    """The parts of a name at which it may be wrapped: `max_`, `read_`, `position`."""
    return re.findall("[^_]*_|[^_]+", name) or [name]


def _header(name: str, width: int | None) -> str:
    lines = [""]
    for word in _words(name):
        if width is not None and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(filter(None, lines))


def _widened(least: Sequence[int], whole: Sequence[int], spare: int) -> list[int]:
    """The widths of columns with the spare columns, of which those get most that need most."""
    widths = [*least]
    wider = sorted(range(len(least)), key=lambda place: whole[place] - least[place])
    for done, place in enumerate(wider):
        more = min(whole[place] - least[place], spare // (len(wider) - done))
        widths[place] += more
        spare -= more
    return widths


def _print_table(rows: Sequence[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = terminal_width()
    console = Console(
        width=columns or UNFOLDED_WIDTH,
        soft_wrap=columns is None,
        markup=False,
        emoji=False,
        highlight=False,
        color_system="auto" if has_style() else None,
    )
    if title:
        console.print(title, style="italic")
    cells = [[_cut(_cell(value)) for value in row.values()] for row in rows]
    names = [*rows[0]]
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in rows[0].values()]
    layout = _Layout(len(GAP), [None] * len(names))
    if columns is not None and (fitting := _Layout.of(names, cells, numbers, columns)) is not None:
        layout = fitting
    elif columns is not None:
        click.echo("\n\n".join("\n".join(_fields(row)) for row in rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, layout.gap, 0, 0))
    for name, number, width in zip(names, numbers, layout.widths, strict=True):
        justify: Literal["right", "left"] = "right" if number else "left"
        table.add_column(_header(name, width), justify=justify, vertical="top", overflow="fold", width=width)
    for row in cells:
        table.add_row(*row, style=None)
    console.print(table)
