"""The soak of a real cluster: its plan has the requested kills, and its report finds all differences."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from soak_scripts import load


@pytest.fixture(scope="module")
def soaking() -> ModuleType:
    return load(Path(__file__).with_name("cluster_soak.py"))


@pytest.mark.parametrize(("brokers", "services"), [(20, 50), (3, 10), (0, 5)])
def test_plan_has_the_requested_kills(soaking: ModuleType, brokers: int, services: int) -> None:
    kills = Counter(soaking.plan(brokers, services, random.Random(1)))
    assert kills["kill_broker"] + kills["kill_broker_and_active"] == brokers
    of_services = kills["kill_active"] + kills["kill_standby"] + 2 * kills["kill_both"]
    assert of_services + kills["kill_broker_and_active"] == services


@pytest.mark.parametrize(
    "wrong", ["lost", "doubled", "half", "uncommitted_seen", "live_differs", "unknown", "disagree", "surprises"]
)
def test_a_report_is_good_without_this(soaking: ModuleType, wrong: str) -> None:
    report = soaking.Report()
    assert report.good
    setattr(report, wrong, ["?"] if wrong == "surprises" else 1)
    assert not report.good
