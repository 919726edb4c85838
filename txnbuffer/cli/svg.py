"""Drawings as SVG: text, lines and shapes in named colours that follow a light or dark page

A drawing is one file with its own background and its own style. It is dark if the reader prefers dark pages; within a
page of the documentation site the page decides. The browser chooses the fonts, so that the width of a text is not
known here: `text_width` is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

SIZE = 13
"""Pixels of the text."""
WIDTH = 480
"""Pixels of a drawing, so that its text is readable on a page of 500."""
SHOWN_WIDTH = 600
"""Pixels of a drawing on a wide page."""
MEAN_WIDTH = {True: 0.62, False: 0.56}
"""Upper bounds of the mean width of a letter, as a part of the size: monospace, and not."""

LIGHT = {
    "paper": "#ffffff", "ink": "#1f2933", "soft": "#56616f", "line": "#c5ccd6", "fill": "#f2f4f7",
    "good": "#1a7a48", "good-fill": "#e0f3e8", "bad": "#b93226", "bad-fill": "#fbe7e4",
    "wait": "#8a5a00", "wait-fill": "#fdf2d5", "main": "#2f51b5", "main-fill": "#e6ebfb",
}  # fmt: skip
DARK = {
    "paper": "#171c24", "ink": "#e4e8ee", "soft": "#a7b1be", "line": "#465060", "fill": "#222935",
    "good": "#5ccb90", "good-fill": "#173526", "bad": "#f0877b", "bad-fill": "#432320",
    "wait": "#e5b454", "wait-fill": "#3d3016", "main": "#8ea8f5", "main-fill": "#222e52",
}  # fmt: skip
"""Colours by name: text, lines, and the same for what is good, bad, waits, or is the subject of the drawing."""


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


STYLE = (
    f".drawing{{{_variables(LIGHT)}font:{SIZE}px system-ui,sans-serif}}"
    f"@media(prefers-color-scheme:dark){{.drawing{{{_variables(DARK)}}}}}"
    f"[data-md-color-scheme=default] .drawing{{{_variables(LIGHT)}}}"
    f"[data-md-color-scheme=slate] .drawing{{{_variables(DARK)}}}"
    ".drawing text{white-space:pre}.drawing .mono{font-family:ui-monospace,monospace}.drawing .bold{font-weight:600}"
)


def text_width(text: str, *, mono: bool = False, size: float = SIZE) -> float:
    """An upper bound of the pixels that a text needs."""
    return len(text) * MEAN_WIDTH[mono] * size


def fitted(text: str, width: float, *, mono: bool = False) -> str:
    """The text, cut with an ellipsis if it may need more than `width` pixels."""
    most = int(width / text_width("x", mono=mono))
    return text if len(text) <= most else f"{text[: max(most - 1, 0)]}…"


class Drawing:
    """A drawing that grows downwards: its parts are drawn in order, and `bottom` is the lowest place of any.

    `name` is that of the file, and unique on a page. Colours are names of `LIGHT`.
    """

    def __init__(self, name: str, title: str, description: str) -> None:
        self.name = name
        self.bottom = 0.0
        self._title = title
        self._description = description
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", *, anchor: str = "start", style: str = ""
    ) -> None:
        """One line of text on the base line `y`; `anchor`: start, middle or end; `style`: words of mono and bold."""
        if not text:
            return
        classes = f" class={quoteattr(style)}" if style else ""
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        place = f'x="{x:g}" y="{y:g}" fill="var(--{colour})"'
        self._add(f"<text {place}{anchored}{classes}>{escape(text)}</text>", y + SIZE / 2)

    def lines(self, x: float, y: float, texts: Sequence[str], colour: str = "ink", *, anchor: str = "start") -> None:
        """Lines of text below each other, the first one on the base line `y`."""
        for number, text in enumerate(texts):
            self.text(x, y + number * (SIZE + 4), text, colour, anchor=anchor)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = "line", *, width: float = 1.5, dashed: bool = False
    ) -> None:
        """Straight lines from point to point."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        style = f'fill="none" stroke="var(--{colour})" stroke-width="{width:g}" stroke-linejoin="round"'
        self._add(f'<polyline points="{path}" {style}{dashes}/>', max(y for _, y in points))

    def arrow(
        self, points: Sequence[tuple[float, float]], colour: str = "soft", *, width: float = 1.5, dashed: bool = False
    ) -> None:
        """Lines whose last one, which is horizontal or vertical, ends in an arrow head."""
        (before, above), (x, y) = points[-2:]
        along, down = (x > before) - (x < before), (y > above) - (y < above)
        self.line([*points[:-1], (x - 6 * along, y - 6 * down)], colour, width=width, dashed=dashed)
        back, side = (x - 8 * along, y - 8 * down), 4
        corners = [
            (x, y),
            (back[0] + side * down, back[1] + side * along),
            (back[0] - side * down, back[1] - side * along),
        ]
        path = " ".join(f"{across:g},{height:g}" for across, height in corners)
        self._add(f'<polygon points="{path}" fill="var(--{colour})"/>', y)

    def box(
        self, x: float, y: float, width: float, height: float, colour: str = "line", fill: str = "fill",
        *, radius: float = 4, dashed: bool = False,
    ) -> None:  # fmt: skip
        """A box; without a line if `colour` is empty."""
        stroke = f' stroke="var(--{colour})" stroke-width="1.5"' if colour else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._add(f'<rect {place} fill="var(--{fill})"{stroke}{dashes}/>', y + height)

    def dot(self, x: float, y: float, colour: str = "ink", *, filled: bool = True, radius: float = 5) -> None:
        fill = colour if filled else "paper"
        place = f'cx="{x:g}" cy="{y:g}" r="{radius:g}"'
        self._add(f'<circle {place} fill="var(--{fill})" stroke="var(--{colour})" stroke-width="1.5"/>', y + radius)

    def svg(self) -> str:
        """The file."""
        height, name = self.bottom + 14, self.name
        shown = f'width="{SHOWN_WIDTH}" height="{height * SHOWN_WIDTH / WIDTH:.0f}"'
        labels = f'role="img" aria-labelledby="{name}-title {name}-description"'
        box = f'class="drawing" viewBox="0 0 {WIDTH} {height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {shown} {labels}>'
        paper = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" fill="var(--paper)" '
        content = [
            f'<title id="{name}-title">{escape(self._title)}</title>',
            f'<desc id="{name}-description">{escape(self._description)}</desc>',
            f"<style>{STYLE}</style>",
            f'{paper}stroke="var(--line)"/>',
        ]
        return "\n".join([head, *content, *self._parts, "</svg>", ""])

    def _add(self, part: str, bottom: float) -> None:
        self._parts.append(part)
        self.bottom = max(self.bottom, bottom)
