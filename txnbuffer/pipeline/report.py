"""Reports as self-contained HTML pages: tables, and plots as SVG, without scripts and external resources"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

COLORS = ("#2b6cb0", "#c53030", "#b7791f", "#2f855a", "#6b46c1")
WIDTH, HEIGHT = 760, 180
BAR = 18
LABEL = 220

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #1a202c; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { padding: .2em .8em .2em 0; text-align: left; border-bottom: 1px solid #e2e8f0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } code { font-size: .95em; } svg { max-width: 100%; }
p.good { color: #276749; } p.bad { color: #c53030; font-weight: 600; } svg text { font: 12px system-ui, sans-serif; }
"""


class Section(NamedTuple):
    """A heading, and its content as fragments of HTML."""

    title: str
    parts: Sequence[str]


def page(title: str, summary: str, good: bool, sections: Iterable[Section]) -> str:
    """The page as HTML; `summary` is the result in a sentence, shown in green if `good`, else in red."""
    body = "".join(f"<h2>{escape(one.title)}</h2>{''.join(one.parts)}" for one in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="{"good" if good else "bad"}">{escape(summary)}</p>{body}</body></html>\n'
    )


def text(line: str) -> str:
    return f"<p>{escape(line)}</p>"


def table(rows: Sequence[Mapping[str, Any]], empty: str = "none") -> str:
    """A table of rows with the same keys; `empty` is the text if there is none."""
    if not rows:
        return text(empty)
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(named: Sequence[tuple[str, float]], unit: str = "") -> str:
    """A bar chart: one horizontal bar per name, its length in proportion to its number."""
    if not named:
        return text("none")
    most = max(value for _, value in named) or 1
    room = WIDTH - LABEL - 110
    rows = []
    for index, (name, value) in enumerate(named):
        top, length = index * (BAR + 6), max(room * value / most, 1)
        rows.append(
            f'<text x="{LABEL - 6}" y="{top + 13}" text-anchor="end">{escape(_short(name))}</text>'
            f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{COLORS[0]}"/>'
            f'<text x="{LABEL + length + 6:.1f}" y="{top + 13}">{_number(value)} {escape(unit)}</text>'
        )
    return _svg(len(named) * (BAR + 6), "".join(rows))


def stacked(labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str = "") -> str:
    """A stacked column chart: one column per label, with each series in its colour."""
    if not labels:
        return text("none")
    totals = [sum(column) for column in zip(*series.values(), strict=True)]
    most = max(totals) or 1
    step = WIDTH / len(labels)
    rectangles = []
    for index in range(len(labels)):
        base = float(HEIGHT)
        for number, values in enumerate(series.values()):
            high = HEIGHT * values[index] / most
            base -= high
            if high:
                rectangles.append(
                    f'<rect x="{index * step:.1f}" y="{base:.1f}" width="{max(step - 1, 0.5):.1f}" height="{high:.1f}" '
                    f'fill="{COLORS[number % len(COLORS)]}"><title>{escape(labels[index])}: {_number(values[index])}'
                    f"</title></rect>"
                )
    ends = (
        f'<text x="0" y="{HEIGHT + 16}">{escape(labels[0])}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{escape(labels[-1])}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 16}" text-anchor="middle">highest: {_number(most)} {escape(unit)}</text>'
    )
    return _svg(HEIGHT + 44, "".join(rectangles) + ends + _legend([*series]))


def _legend(names: Sequence[str]) -> str:
    return "".join(
        f'<rect x="{index * 130}" y="{HEIGHT + 28}" width="12" height="12" fill="{COLORS[index % len(COLORS)]}"/>'
        f'<text x="{index * 130 + 18}" y="{HEIGHT + 39}">{escape(name)}</text>'
        for index, name in enumerate(names)
    )


def _svg(height: float, inner: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}">{inner}</svg>'
    )


def _cell(value: Any) -> str:
    if value is None:
        return "<td>-</td>"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="n">{_number(value)}</td>'
    return f"<td>{escape(shown(value) if isinstance(value, bytes) else str(value))}</td>"


def shown(data: bytes | None) -> str:
    """A key as readable text."""
    return "(no key)" if data is None else data.decode(errors="backslashreplace")


def _short(name: str) -> str:
    return name if len(name) <= 32 else name[:31] + "…"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
