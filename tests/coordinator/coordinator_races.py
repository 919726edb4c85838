"""The race table as data: progress of the predecessor, fate of its pending appends, and what its client does next."""

from __future__ import annotations

from txnbuffer.model import Outcome

# Progress of the predecessor for each way to decide, and the first point at which the outcome is durable.
POINTS = {
    "one-phase": ("asked", "marker written", "marker durable", "marker applied", "below the low-water mark"),
    "decided": (
        "decision written",
        "decision durable",
        "decision acknowledged",
        "one marker durable",
        "all markers durable",
        "below the low-water mark",
    ),
}
DURABLE = {"one-phase": "marker durable", "decided": "decision durable"}

# What happens to the pending appends of the predecessor.
PREDECESSORS = {
    "crashes": "they are lost",
    "is slow": "they are written just before the fence, a one-phase marker before the epoch marker",
    "is a zombie": "they are written after the epoch marker, or rejected by the fence",
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
