"""The rules about a topic whose data is destroyed: each accepts what is right, and names what is wrong."""

from __future__ import annotations

import pytest
from sim.destruction import DESTRUCTIONS, TOPIC, unharmed, without_gaps
from sim.history import Attempt, Fate, Reading, Shown
from sim.kinds import run_seed
from sim.reduction import Part
from sim.scenario import Size

from txnbuffer.model import Position

FATES = (Fate.COMMITTED, Fate.ABORTED, Fate.COMMITTED, Fate.ASKED, Fate.COMMITTED)


def attempts() -> list[Attempt]:
    """One attempt of each fate, each with its number as its value."""
    found = []
    for number, fate in enumerate(FATES):
        attempt = Attempt("wrecker", fate=fate, first_sent=float(number))
        attempt.writes[TOPIC].append(b"%d" % number)
        found.append(attempt)
    return found


def records(text: str) -> list[Shown]:
    return [Shown(at + 1, b"k", value.encode(), Position(1, at)) for at, value in enumerate(text)]


@pytest.mark.parametrize(
    ("there", "destroyed", "lost_at", "text"),
    [
        ("024", (), -1.0, ""),
        ("0234", (), -1.0, ""),
        ("24", (b"0",), -1.0, ""),
        ("24", (), 1.0, ""),
        ("24", (), -1.0, "wrote b'0', which nobody destroyed"),
        ("02", (b"0",), 3.0, "wrote b'4', which nobody destroyed"),
        ("0124", (), -1.0, "must not be visible"),
        ("0224", (), -1.0, "twice there, or not in their order"),
        ("204", (), -1.0, "twice there, or not in their order"),
    ],
)
def test_what_was_not_destroyed_is_there_and_nothing_else(
    there: str, destroyed: tuple[bytes, ...], lost_at: float, text: str
) -> None:
    found = "\n".join(unharmed(records(there), attempts(), {*destroyed}, lost_at))
    assert text in found
    assert bool(found) == bool(text)


@pytest.mark.parametrize(
    ("shown", "lost_at", "text"),
    [
        ("024", -1.0, ""),
        ("0234", -1.0, ""),
        ("24", -1.0, ""),
        ("04", 2.0, ""),
        ("04", -1.0, "without an error"),
        ("20", -1.0, "after"),
        ("22", -1.0, "after"),
    ],
)
def test_a_reader_passes_over_nothing_without_an_error(shown: str, lost_at: float, text: str) -> None:
    reading = Reading("reader", TOPIC, records(shown))
    found = "\n".join(without_gaps(reading, attempts(), lambda attempt: attempt.first_sent > lost_at))
    assert text in found
    assert bool(found) == bool(text)


def test_a_seed_destroys_data_of_its_topic_and_harms_nothing_else() -> None:
    outcome = run_seed(1, "cluster", Size(2, 15, 3, 10.0), part=Part(roles=("reader", "destruction")))
    assert outcome.finding == ""
    assert any(kind in outcome.counts for kind in DESTRUCTIONS)
