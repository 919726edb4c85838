"""Members of a group as processes on a partitioned topic of a real cluster, which grows meanwhile."""

from __future__ import annotations

from groups_soak import beside_pulsar, made_up
from pulsar_cluster import Cluster


def test_each_record_is_processed_once_while_members_change(cluster: Cluster, namespace: str) -> None:
    report = beside_pulsar((cluster.url, cluster.admin, namespace), events=4, seed=5, flights=made_up())
    assert report.wrong == []
    assert report.records == 160
    assert report.generation > 1
