"""The race table as data: how far a predecessor had come, what becomes of what it had under way, who comes back."""

from __future__ import annotations

from txnbuffer.model import Outcome

# How far the predecessor has come, for each way to decide; the first point at which the outcome is durable.
POINTS = {
    "one-phase": ("asked", "marker written", "marker landed", "marker applied", "passed by the mark"),
    "decided": (
        "decision written",
        "decision landed",
        "decision acknowledged",
        "one marker landed",
        "all markers landed",
        "passed by the mark",
    ),
}
DURABLE = {"one-phase": "marker landed", "decided": "decision landed"}

# What becomes of what the predecessor has under way.
PREDECESSORS = {
    "crashes": "nothing of it lands",
    "is slow": "it lands just before the fence, a one-phase marker before the epoch marker",
    "is a zombie": "it lands after the epoch marker, or finds the log fenced",
}
CLIENTS = ("commits again", "aborts", "stays away")


def is_durable(way: str, point: str, predecessor: str) -> bool:
    points = POINTS[way]
    return predecessor == "is slow" or points.index(point) >= points.index(DURABLE[way])


def expected(way: str, point: str, predecessor: str, intent: Outcome, client: str) -> Outcome:
    if is_durable(way, point, predecessor):
        return intent
    return Outcome.COMMIT if client == "commits again" else Outcome.ABORT


def race_table() -> str:
    """The table as Markdown: the outcome of a commit that the predecessor had accepted."""
    lines = ["| way | predecessor had got to | " + " | ".join(f"and {name}" for name in PREDECESSORS) + " |"]
    lines.append("|---|---|" + "---|" * len(PREDECESSORS))
    for way, points in POINTS.items():
        for point in points:
            cells = ["COMMIT" if is_durable(way, point, one) else "open" for one in PREDECESSORS]
            lines.append(f"| {way} | {point} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
