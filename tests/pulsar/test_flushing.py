"""Writers that send at once what is alone."""

from __future__ import annotations

from pulsar_cluster import Cluster
from source_tree import ROOT

from broker_io import open_broker
from broker_io.batch import Batch, Message

SECONDS = 120.0


def test_nothing_flushes_while_it_keeps_other_threads_from_python() -> None:
    """The library's `flush_async` does: once in some thousand calls it waits for a thread that waits for Python."""
    calls = [path.name for path in (ROOT / "broker_io/pulsar").glob("*.py") if ".flush_async(" in path.read_text()]
    assert calls == []


def test_appends_of_any_size_are_acknowledged_when_they_are_alone(cluster: Cluster, namespace: str) -> None:
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            for size in range(1, 100, 3):
                positions = writer.append(Batch.of([Message(None, b"v")] * size)).result(SECONDS)
                assert len(positions) == size
