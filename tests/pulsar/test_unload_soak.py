"""The soak of unloads: its plan has the requested unloads, and its report finds all differences."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from soak_scripts import load


@pytest.fixture(scope="module")
def soaking() -> ModuleType:
    return load(Path(__file__).with_name("unload_soak.py"))


@pytest.mark.parametrize(("unloads", "restarts"), [(50, 5), (3, 0), (0, 2)])
def test_plan_has_the_requested_unloads(soaking: ModuleType, unloads: int, restarts: int) -> None:
    events = Counter(soaking.plan(unloads, restarts, random.Random(1)))
    assert events.pop("kill_broker", 0) == restarts
    assert events.total() == unloads
    assert {*events} <= {*soaking.UNLOADS}
    assert len(events) == min(unloads, len(soaking.UNLOADS))


@pytest.mark.parametrize("wrong", ["lost", "live_differs", "ended_by_unloads", "copies_differ", "stream_differs"])
def test_a_report_is_good_without_this(soaking: ModuleType, wrong: str) -> None:
    report = soaking.Unloaded()
    assert report.good
    setattr(report, wrong, ["?"] if wrong == "ended_by_unloads" else 1)
    assert not report.good
