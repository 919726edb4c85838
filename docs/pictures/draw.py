"""Draws the pictures of the documentation from real runs: `python docs/pictures/draw.py [DIRECTORY]`.

Without DIRECTORY it replaces the files in docs/pictures. The drawings have no times and no random ids, so that each run
draws the same; a test compares them with the files.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import scenes  # noqa: E402  # of this directory

from txnbuffer.cli.log_picture import as_drawing  # noqa: E402
from txnbuffer.cli.svg import WIDTH, Drawing  # noqa: E402

PAD = 16
LEFT, RIGHT = PAD, WIDTH - PAD
TOP = 44
CHECK = ((-4.0, 0.0), (-1.0, 3.0), (4.0, -3.0))
CROSS = ((-4.0, -4.0), (0.0, 0.0), (4.0, -4.0), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0), (-4.0, 4.0))


def log() -> Drawing:
    return as_drawing(scenes.log_of_three_transactions(), "log")


# A commit: life lines on the left, what happens on the right

LIVES = {"client": 46, "service": 110, "journal": 174, "ledgers": 238}
STEP = 52
DETAIL = 23
"""Letters of a line of details."""


def commit() -> Drawing:
    events = scenes.commit_events()
    syncs = sum(event.what == "sync" for event in events)
    drawing = Drawing(
        "commit",
        "A commit on an embedded log",
        "A client sends one frame to the service. The service writes one atomic append to the journal, syncs it once, "
        "writes the ledgers without a sync, and answers.",
    )
    drawing.text(LEFT, 28, "a commit of two topics, through a service", style="bold")
    rows = _without_repeats(events)
    bottom = TOP + 34 + STEP * len(rows)
    for name, x in LIVES.items():
        drawing.line([(x, TOP + 26), (x, bottom)])
        drawing.box(x - 29, TOP, 58, 26)
        drawing.text(x, TOP + 17.5, name, anchor="middle")
    for number, event in enumerate(rows):
        y = TOP + 34 + STEP * number + STEP / 2
        what, detail = _commit_step(drawing, event, y, syncs)
        details = textwrap.wrap(detail, DETAIL)
        first = y + 4.5 - 8.5 * len(details)
        drawing.text(278, first, what)
        drawing.lines(278, first + 17, details, "soft")
    return drawing


def _without_repeats(events: Sequence[scenes.Event]) -> list[scenes.Event]:
    """The events, those that follow an equal one left out."""
    return [event for number, event in enumerate(events) if not number or events[number - 1] != event]


def _commit_step(drawing: Drawing, event: scenes.Event, y: float, syncs: int) -> tuple[str, str]:
    """Draw one event; what happens, and a detail."""
    client, service, journal, ledgers = LIVES.values()
    if event.what == "frame":
        drawing.arrow([(client, y), (service, y)], "main")
        return "one frame", event.detail
    if event.what == "append":
        drawing.arrow([(service, y), (journal, y)], "main")
        return "one append, all or nothing", event.detail
    if event.what == "durable":
        drawing.arrow([(journal, y), (service, y)], "good")
        return "durable", ""
    if event.what == "answer":
        drawing.arrow([(service, y), (client, y)], "good")
        return event.detail, ""
    if event.what == "sync":
        drawing.box(journal - 18, y - 11, 36, 22, "good", "good-fill")
        drawing.text(journal, y + 4.5, "sync", "good", anchor="middle")
        return f"{syncs} sync{'s' * (syncs != 1)}", "the disk has all of it"
    if event.detail == "ledgers":
        drawing.arrow([(journal, y), (ledgers, y)], "soft", dashed=True)
        return "write without a sync", "a checkpoint syncs them"
    drawing.box(journal - 20, y - 11, 40, 22, "main", "main-fill")
    drawing.text(journal, y + 4.5, "write", "main", anchor="middle")
    return "one write", ""


# A takeover: two owners on the left, the logs as columns

OWNERS = {1: 42, 2: 106}
LOGS = {scenes.DECISIONS: (206, "decision log"), "orders": (312, "orders"), "stock": (418, "stock")}


def takeover() -> Drawing:
    appends = asyncio.run(scenes.takeover())
    drawing = Drawing(
        "takeover",
        "A service takes over",
        "Owner 1 writes its decision to the decision log and one of two markers, and ends. Owner 2 writes its entry to "
        "the decision log, reads the decision, and writes both markers.",
    )
    drawing.text(LEFT, 28, "a service takes over in the middle of a commit", style="bold")
    for number, x in OWNERS.items():
        drawing.text(x, TOP + 17, f"owner {number}", anchor="middle")
    for x, title in LOGS.values():
        drawing.text(x, TOP + 17, title, anchor="middle")
    top, step = TOP + 26, 36
    ends = 1 + next(number for number, append in enumerate(appends) if append.lost)
    lives = {1: (top, top + step * ends + 14), 2: (top + step * ends + 8, top + step * len(appends) + 8)}
    for number, (first, last) in lives.items():
        drawing.line([(OWNERS[number], first), (OWNERS[number], last)], width=2)
    for number, append in enumerate(appends):
        _append(drawing, append, top + step * number + step / 2 + (16 if number >= ends else 0))
    x, y = OWNERS[1], lives[1][1]
    drawing.line([(x + across, y + down) for across, down in CROSS], "bad", width=2.5)
    drawing.text(x + 12, y + 4.5, "ends", "bad")
    drawing.lines(
        LEFT,
        drawing.bottom + 30,
        [
            "The entry of owner 2 fences the decision log. Then it reads the",
            "decision, and writes both markers: orders ignores the second one.",
        ],
        "soft",
    )
    return drawing


def _append(drawing: Drawing, append: scenes.Append, y: float) -> None:
    """One entry: an arrow from its owner to a box in the column of its log."""
    x, _ = LOGS[append.topic]
    colour = "bad" if append.lost else "main" if append.topic == scenes.DECISIONS else "good"
    drawing.arrow([(OWNERS[append.owner], y), (x - 46, y)], colour, dashed=append.lost)
    drawing.dot(OWNERS[append.owner], y, colour, radius=4)
    drawing.box(x - 46, y - 13, 92, 26, colour, "paper" if append.lost else f"{colour}-fill", dashed=append.lost)
    drawing.text(x, y + 4.5, append.text, colour, anchor="middle")


# A snapshot: the log as a bar, and the entry of each of its regions


def snapshot() -> Drawing:
    found = scenes.snapshot()
    drawing = Drawing(
        "snapshot",
        "The snapshot of a topic",
        "Segments topic-1 and topic-2 have the aborts of earlier parts of the log. The end entry topic-end names them, "
        "and has the newer aborts and the applied position. The log after it is replayed.",
    )
    drawing.text(LEFT, 28, "the log of a topic, and the entries of its snapshot", style="bold")
    entries = [*found.segments, found.end]
    scale = (RIGHT - LEFT - 10) / (found.log_end.entry + 1)
    left, top, step = float(LEFT), TOP + 50, 60
    for number, entry in enumerate(entries):
        assert entry.last is not None
        colour = "main" if entry is found.end else "good"
        right = LEFT + entry.last.entry * scale
        drawing.box(left, TOP, right - left - 2, 26, colour, f"{colour}-fill", radius=3)
        drawing.text((left + right) / 2, TOP + 17.5, entry.key, colour, anchor="middle", style="mono")
        y, left = top + number * step, right
        drawing.box(LEFT + 24, y, 100, 30, colour, f"{colour}-fill")
        drawing.text(LEFT + 74, y + 19.5, entry.key, colour, anchor="middle", style="mono")
        drawing.text(LEFT + 140, y + 11, f"{entry.aborts:,} aborts, up to {entry.last}")
    end = top + (len(entries) - 1) * step
    for number in range(len(found.segments)):
        y = top + number * step + 15
        drawing.text(LEFT + 140, y + 14, "sealed: its content never changes", "soft")
        drawing.arrow([(LEFT + 24, end + 15), (LEFT + 4, end + 15), (LEFT + 4, y), (LEFT + 24, y)], "main")
    names = f"names topic-{found.names[0]} to topic-{found.names[-1]}, so written last"
    drawing.text(LEFT + 140, end + 29, names, "soft")
    drawing.box(left, TOP, RIGHT - left, 26, "wait", "wait-fill", radius=3)
    drawing.box(LEFT + 24, end + step, 100, 30, "wait", "wait-fill")
    drawing.text(LEFT + 74, end + step + 19.5, "replayed", "wait", anchor="middle")
    drawing.text(LEFT + 140, end + step + 11, f"the log after position {found.applied}")
    left_over = found.log_end.entry - found.applied.entry
    drawing.text(LEFT + 140, end + step + 29, f"{left_over} messages in this run", "soft")
    return drawing


# A group: the records of each topic, and up to where they are consumed

CELL = 22


def group() -> Drawing:
    shares = asyncio.run(scenes.group())
    drawing = Drawing(
        "group",
        "A consumer group and its positions",
        " ".join(
            f"Member {share.member + 1} reads topic {share.topic}: {share.consumed} records consumed, {share.lag} not."
            for share in shares
        ),
    )
    drawing.text(LEFT, 28, "group billing: two members share four topics", style="bold")
    row, top = 46, TOP + 8
    for number, share in enumerate(shares):
        y = top + row * number
        drawing.text(118, y + 19, share.topic)
        for record in range(share.consumed + share.lag):
            colour = "good" if record < share.consumed else "wait"
            drawing.box(174 + CELL * record, y + 4, CELL - 6, CELL - 2, colour, f"{colour}-fill", radius=3)
        x = 174 + CELL * share.consumed - 3
        drawing.line([(x, y - 2), (x, y + 30)], "main", width=2.5)
        drawing.text(RIGHT, y + 19, f"lag {share.lag}", "wait" if share.lag else "good", anchor="end")
    for member in (0, 1):
        own = [number for number, share in enumerate(shares) if share.member == member]
        first, last = top + row * own[0], top + row * own[-1] + 28
        drawing.box(LEFT, first, 84, last - first, "main", "main-fill")
        drawing.text(LEFT + 42, (first + last) / 2 + 4.5, f"member {member + 1}", "main", anchor="middle")
    y = drawing.bottom + 26
    drawing.line([(LEFT + 3, y - 12), (LEFT + 3, y + 4)], "main", width=2.5)
    drawing.text(LEFT + 18, y, "position: it moves in the transaction of what the handler sends")
    drawing.box(LEFT - 2, y + 14, 12, 12, "good", "good-fill", radius=3)
    drawing.text(LEFT + 18, y + 24, "consumed")
    drawing.box(122, y + 14, 12, 12, "wait", "wait-fill", radius=3)
    drawing.text(142, y + 24, "not yet consumed")
    return drawing


# A pair: two machines, their lock and their clients


def pair() -> Drawing:
    live, backup = scenes.machines()
    drawing = Drawing(
        "pair",
        "A pair of machines",
        "Clients write to the live machine. It syncs its journal and sends the records to the backup, which syncs them "
        "too; then the live machine acknowledges. A lock outside decides which machine is live.",
    )
    drawing.text(LEFT, 28, "a pair: one log on two machines", style="bold")
    drawing.box(180, TOP, 120, 34, "wait", "wait-fill")
    drawing.text(240, TOP + 21.5, "lock (etcd)", "wait", anchor="middle")
    top = TOP + 84
    for x, machine, colour in ((LEFT, live, "good"), (RIGHT - 176, backup, "main")):
        drawing.box(x, top, 176, 92, colour, f"{colour}-fill")
        drawing.text(x + 88, top + 24, machine.role, colour, anchor="middle", style="bold")
        drawing.text(x + 88, top + 48, "journal and ledgers", anchor="middle")
        drawing.text(x + 88, top + 70, "has all" if machine.has_all else "lacks records", colour, anchor="middle")
    drawing.arrow([(LEFT + 88, top), (LEFT + 88, TOP + 17), (180, TOP + 17)], "wait")
    drawing.text(LEFT + 96, top - 24, "renews its lease", "soft")
    drawing.arrow([(RIGHT - 88, top), (RIGHT - 88, TOP + 17), (300, TOP + 17)], "wait", dashed=True)
    drawing.text(RIGHT - 96, top - 24, "reads", "soft", anchor="end")
    drawing.arrow([(LEFT + 176, top + 30), (RIGHT - 176, top + 30)], "main", width=2)
    drawing.arrow([(RIGHT - 176, top + 66), (LEFT + 176, top + 66)], "good", width=2)
    base = top + 92
    drawing.arrow([(LEFT + 60, base + 50), (LEFT + 60, base)], "main", width=2)
    drawing.arrow([(LEFT + 116, base), (LEFT + 116, base + 50)], "good", width=2)
    drawing.box(LEFT, base + 50, 176, 34)
    drawing.text(LEFT + 88, base + 71.5, "clients", anchor="middle")
    places = ((LEFT + 60, base + 24), (240, top + 30), (240, top + 66), (LEFT + 116, base + 24))
    steps = (
        "a client sends records and a commit",
        "the live machine syncs its journal, and sends it on",
        "the backup has synced it too",
        f"acknowledged: {live.in_sync} machines have it",
    )
    for number, ((x, y), text) in enumerate(zip(places, steps, strict=True), 1):
        _number(drawing, x, y, number)
        _number(drawing, LEFT + 9, base + 112 + 24 * number, number)
        drawing.text(LEFT + 28, base + 116.5 + 24 * number, text)
    return drawing


def _number(drawing: Drawing, x: float, y: float, number: int) -> None:
    drawing.dot(x, y, "ink", filled=False, radius=9)
    drawing.text(x, y + 4.5, str(number), anchor="middle")


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "log": log, "commit": commit, "takeover": takeover, "snapshot": snapshot, "group": group, "pair": pair,
}  # fmt: skip


def main(directory: Path, names: Sequence[str]) -> None:
    for name in names or DRAWINGS:
        (directory / f"{name}.svg").write_text(DRAWINGS[name]().svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, sys.argv[2:])
