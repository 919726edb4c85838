"""The accepted figures of `calls.`: the table `calls.toml`, how far a figure may be from it, and the table of the page.

The figures hold for the version of Python in the table. Its other versions call more or fewer functions.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("calls.toml")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
BEGIN = "<!-- Made by bench/calls_table.py: run `make bench ONLY=calls ARGS=--accept`, don't edit. -->\n"
END = "<!-- End of what bench/calls_table.py makes. -->\n"
ACCEPT = "make bench ONLY=calls ARGS=--accept"
PYTHON = (3, 11)
COLUMNS = {
    "python": "Python calls",
    "c": "C calls",
    "syncs": "syncs",
    "iterations": "loop iterations",
    "frames": "frames",
    "modules": "modules",
    "functions": "functions",
}
UNITS = {name: name if name not in ("python", "c") else "calls" for name in COLUMNS}
FOR_ALL_VERSIONS = ("syncs", "frames")
SPREAD = 0.05
ALLOWED = {"syncs": 0.5, "iterations": 1.5, "frames": 0.5}
"""What a figure may differ in addition to SPREAD: the last sync of a transaction may also be the first of the next."""
GAIN = 0.1
"""From this share on a lower figure must be accepted, or the gain could be lost unnoticed."""

Row = Mapping[str, float]


def accepted() -> dict[str, dict[str, float]]:
    """Work → what is counted → the accepted figure."""
    return tomllib.loads(TABLE.read_text()) if TABLE.exists() else {}


def allowance(what: str, figure: float, in_flight: int, spread: float) -> float:
    """How much a figure may be above an accepted one: the order of tasks varies a little."""
    return figure * spread + ALLOWED.get(what, 0.0) / in_flight


def problems(work: str, found: Row, row: Row, in_flight: int = 1, spread: float = SPREAD) -> Iterator[str]:
    """What is wrong with the figures of some work, given the accepted ones."""
    for what, figure in found.items():
        name, allowed = f"calls.{work}.{what}", row.get(what)
        if allowed is None:
            yield f"{name} is {figure:.4g}, and nothing is accepted yet: run {ACCEPT}"
            continue
        more, slack = figure - allowed, allowance(what, allowed, in_flight, spread)
        share = f"{abs(more) / allowed:.0%}" if allowed else f"{figure:.4g}"
        if more > slack:
            yield (
                f"{name} is {figure:.4g}, which is {share} above the accepted {allowed:.4g}: make the path shorter "
                f"again, or accept it with {ACCEPT}, and say in the commit why it is worth that"
            )
        elif -more > max(1.5 * slack, GAIN * allowed):
            yield (
                f"{name} is {figure:.4g}, which is {share} below the accepted {allowed:.4g}: accept it with {ACCEPT}, "
                "so that the gain cannot be lost unnoticed"
            )


def write(works: Iterable[str], figures: Mapping[str, float]) -> None:
    """Accept figures, by their names; others of these works stay as they are. Raises ValueError with another Python."""
    if sys.version_info[:2] != PYTHON:
        raise ValueError("the accepted calls are those of Python {}.{}: run this with it".format(*PYTHON))
    before = accepted()
    table = {work: before.get(work, {}) for work in works}
    for name, figure in figures.items():
        work, _, what = name.removeprefix("calls.").rpartition(".")
        table[work][what] = figure
    lines = [f"# Accepted figures of Python {PYTHON[0]}.{PYTHON[1]}, written by `{ACCEPT}`."]
    for work, row in table.items():
        lines += ["", f'["{work}"]', *(f"{what} = {row[what]:g}" for what in COLUMNS if what in row)]
    TABLE.write_text("\n".join([*lines, ""]))
    put(PAGE, BEGIN, page_table(table), END)


def put(page: Path, begin: str, text: str, end: str) -> None:
    """Replace what a page has between two lines."""
    head, _, rest = page.read_text().partition(begin)
    page.write_text(head + begin + text + end + rest.partition(end)[2])


def page_table(table: Mapping[str, Row]) -> str:
    """The table of docs/performance.md."""
    lines = ["", "| work | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---|" * len(COLUMNS)]
    for work, row in table.items():
        cells = [_shown(row[what]) if what in row else "" for what in COLUMNS]
        lines.append(f"| `{work}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""])


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
