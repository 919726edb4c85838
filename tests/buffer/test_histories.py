"""The generator of histories reaches the rare interleavings, so that not only easy histories are tested."""

from __future__ import annotations

from collections import Counter

from buffer.naive import Naive
from histories import histories
from hypothesis import given, settings

from txnbuffer.model import Outcome

RARE = {
    "commits something": 60,
    "aborts something": 60,
    "late": 100,
    "duplicate": 40,
    "undecodable": 50,
    "void": 60,
    "damage": 40,
    "below the low-water mark but ongoing": 10,
    "several ledgers": 80,
    "trims": 60,
    "partly suppressed set": 10,
    "undecided at the end": 60,
    "several coordinators": 60,
}
"""The minimum number of 300 histories with each feature."""


def features(history) -> set[str]:
    log = history.log
    naive = Naive(log.events)
    hidden = {*naive.late, *naive.duplicates}
    sets = [event.records for event in log.events if event.size is not None and not event.bad]
    found = {
        "commits something": bool(naive.visible()) and any(end is Outcome.COMMIT for _, _, end in naive.ends),
        "aborts something": bool(naive.aborted_ids()),
        "late": bool(naive.late),
        "duplicate": bool(naive.duplicates),
        "undecodable": bool(naive.undecodable),
        "void": bool(naive.void),
        "damage": bool(naive.damage),
        "below the low-water mark but ongoing": any(
            txn.least <= naive.low_water_mark(txn.most, len(log.events)) for _, txn in naive.undecided()
        ),
        "several ledgers": log.ledger > 1,
        "trims": bool(history.trims),
        "partly suppressed set": any(0 < len(hidden.intersection(records)) < len(records) for records in sets),
        "undecided at the end": bool(naive.undecided()),
        "several coordinators": len({event.marker.coordinator for event in log.events if event.marker}) > 1,
    }
    return {name for name, holds in found.items() if holds}


def test_histories_hold_what_is_rare() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300, derandomize=True, database=None)
    @given(histories())
    def draw(history) -> None:
        seen.update(features(history))

    draw()
    assert {name: seen[name] for name, least in RARE.items() if seen[name] < least} == {}
