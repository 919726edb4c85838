"""Members of a group as processes on a partitioned topic of a real cluster, which grows meanwhile; and their lag."""

from __future__ import annotations

from collections.abc import Callable

from groups_soak import beside_pulsar, made_up
from pulsar_cluster import Cluster

from bench.log_owner import LogOwner
from broker_io.port import Broker
from broker_io.position import Position
from broker_io.testing.contract.base import WAIT_SECONDS, numbered, put
from txnbuffer import CommittedReader
from txnbuffer.service.topics.group_lag import NumberedLog, records_after


def test_each_record_is_processed_once_while_members_change(cluster: Cluster, namespace: str) -> None:
    report = beside_pulsar((cluster.url, cluster.admin, namespace), events=4, seed=5, flights=made_up())
    assert report.wrong == []
    assert report.records == 160
    assert report.generation > 1


def test_group_lag_counts_the_records_of_shared_entries(opening: Callable[..., Broker]) -> None:
    """Ten records that were sent at once may be one entry: their positions differ by the index only."""
    broker = opening()
    with LogOwner(broker) as manager:
        manager.recover()
        broker.create_topic("plain")
        manager.register("orders")
        places: dict[str, list[Position]] = {}
        for topic in ("plain", "orders"):
            with broker.writer(topic) as writer:
                places[topic] = [place for _ in range(2) for place in put(writer, numbered(10))]
            assert len({place[:2] for place in places[topic]}) == 2
        manager.pump()
        manager.snapshot("orders")
        for topic, known in (("plain", None), ("orders", NumberedLog.load(broker, "orders"))):
            lags = [records_after(broker, topic, place, known) for place in (None, *places[topic])]
            assert lags == [20 - read for read in range(21)]


def test_reader_inside_an_entry_is_behind(opening: Callable[..., Broker]) -> None:
    broker = opening()
    broker.create_topic("orders")
    with broker.writer("orders") as writer:
        put(writer, numbered(10))
    with CommittedReader(broker, "orders") as reader:
        assert len(list(reader.read(limit=3, timeout=WAIT_SECONDS) or ())) == 3
        assert reader.lag()["orders"].behind == 1
        assert len(list(reader.read(timeout=WAIT_SECONDS) or ())) == 7
        assert reader.lag()["orders"].behind == 0
