"""The soak of plain consumers: what it says of wrong messages, orders and repeats."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
from foreign_consumers import Repeat
from soak_scripts import load

WANTED = [b"a/0", b"b/0", b"a/1", b"b/1"]


@pytest.fixture(scope="module")
def soaking() -> ModuleType:
    return load(Path(__file__).with_name("plain_soak.py"))


@pytest.mark.parametrize(
    ("kind", "got", "told"),
    [
        ("Exclusive", WANTED, ""),
        ("Exclusive", WANTED[:3], "missing 1"),
        ("Shared", [*WANTED, b"marker"], "too many 1"),
        ("reader", [*WANTED, b"b/1"], "too many 1"),
        ("Failover", [b"b/0", b"a/0", b"a/1", b"b/1"], "other order from 0"),
        ("Key_Shared", [b"b/0", b"a/0", b"a/1", b"b/1"], ""),
        ("Key_Shared", [b"a/1", b"b/0", b"a/0", b"b/1"], "other order of b'a'"),
    ],
)
def test_differences_are_told(soaking: ModuleType, kind: str, got: list[bytes], told: str) -> None:
    found = soaking.difference(kind, got, WANTED)
    assert told in found
    assert bool(found) == bool(told)
    report = soaking.PlainReport()
    report.differences += [found] * bool(found)
    assert report.good != bool(found)


def test_repeats_need_an_event_between_both_deliveries(soaking: ModuleType) -> None:
    schedule = soaking.Schedule(0.0, random.Random(1))
    schedule.times = [(100.0, 110.0)]
    assert schedule.explains(Repeat("Shared", 90.0, 105.0))
    assert schedule.explains(Repeat("Shared", 105.0, 300.0))
    assert not schedule.explains(Repeat("Shared", 80.0, 90.0))
    assert not schedule.explains(Repeat("Shared", 150.0, 160.0))


@pytest.mark.parametrize("name", ["EVENTS", "MOVES"])
def test_events_have_their_times_and_end(soaking: ModuleType, name: str) -> None:
    chosen = getattr(soaking, name)
    schedule = soaking.Schedule(0.05, random.Random(1), chosen)
    events = [*schedule]
    assert {*events} <= {*chosen} == {event for event in chosen if hasattr(soaking.PlainSoak, f"_{event}")}
    assert len(schedule.times) == len(events)
