"""The soak of unloads: its plan has the requested unloads, and its report finds all differences."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from soak_scripts import load

from broker_io.standalone import Standalone


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


@pytest.mark.parametrize(
    "wrong", ["lost", "live_differs", "takeovers", "ended_by_themselves", "copies_differ", "stream_differs"]
)
def test_a_report_is_good_without_this(soaking: ModuleType, wrong: str) -> None:
    report = soaking.Unloaded()
    assert report.good
    setattr(report, wrong, ["?"] if wrong == "ended_by_themselves" else 1)
    assert not report.good


def test_no_standby_takes_over_from_a_service_that_is_alive(soaking: ModuleType, mortal: Standalone) -> None:
    """The active service loses its connections by each of these, and nobody else may have the log meanwhile."""
    events = [*soaking.UNLOADS, "kill_broker"]
    report = soaking.soak(mortal, events, seed=1, writers=1, services=2)
    assert report.good, report
