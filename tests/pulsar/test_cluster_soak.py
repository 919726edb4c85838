"""The soak of a real cluster in its short form, and that it kills as often as it says."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from pulsar_cluster import Cluster
from soak_scripts import load

EVENTS = ["kill_active", "kill_writer", "kill_broker", "make_zombie", "stop_writer", "kill_standby"]
EVENTS += ["kill_broker_and_active"]


@pytest.fixture(scope="module")
def soaking() -> ModuleType:
    return load(Path(__file__).with_name("cluster_soak.py"))


def test_writers_service_and_readers_agree_through_kills_of_all(cluster: Cluster, soaking: ModuleType) -> None:
    with cluster.private_standalone() as broker:
        report = soaking.soak(broker, EVENTS, seed=20260101, writers=2)
    assert report.good, report
    assert report.committed > 0
    assert (report.broker_kills, report.service_kills, report.writer_kills, report.zombies) == (2, 3, 1, 2)


def test_readers_see_transactions_across_shards_whole_through_kills(cluster: Cluster, soaking: ModuleType) -> None:
    report = soaking.soak(cluster, ["kill_active", "make_zombie", "kill_actives"], seed=20260104, writers=1, shards=2)
    assert report.good, report
    assert report.committed > 0
    assert (report.service_kills, report.zombies) == (3, 1)


@pytest.mark.parametrize(("brokers", "services"), [(20, 50), (3, 10), (0, 5)])
def test_the_plan_kills_as_often_as_it_is_told(soaking: ModuleType, brokers: int, services: int) -> None:
    kills = Counter(soaking.plan(brokers, services, random.Random(1)))
    assert kills["kill_broker"] + kills["kill_broker_and_active"] == brokers
    of_services = kills["kill_active"] + kills["kill_standby"] + 2 * kills["kill_both"]
    assert of_services + kills["kill_broker_and_active"] == services


@pytest.mark.parametrize(
    "wrong", ["lost", "doubled", "half", "uncommitted_seen", "live_differs", "untold", "disagree", "surprises"]
)
def test_a_report_is_good_without_this(soaking: ModuleType, wrong: str) -> None:
    report = soaking.Report()
    assert report.good
    setattr(report, wrong, ["?"] if wrong == "surprises" else 1)
    assert not report.good
