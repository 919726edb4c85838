"""Each command answers, or refuses in one sentence, at a cluster with a service: the rows of the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
from command_table import ROWS, Place, Row, filled
from commands import txnbuf
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from txnbuffer import connect

ADMIN = "TXNBUFFER_PULSAR_ADMIN_URL"


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[Place]:
    name = cluster.namespace()
    address = f"{cluster.url}/{name}"
    with (
        ServiceProcess(address, "--admin-url", cluster.admin),
        connect(address, broker_options={"admin_url": cluster.admin}) as client,
        filled(client) as transactions,
    ):
        yield Place("cluster", address, transactions, {ADMIN: cluster.admin})
    cluster.drop(name)


@pytest.mark.parametrize("row", ROWS, ids=attrgetter("line"))
def test_a_cluster(row: Row, place: Place, tmp_path: Path) -> None:
    place.check(row, tmp_path)


def test_a_cluster_without_a_service_answers_from_its_topics(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with open_broker(address, **options) as broker:
        broker.partition("wide", 2)
    service = ServiceProcess(address, "--admin-url", cluster.admin).wait_serving()
    with connect(address, broker_options=options, max_unavailable=1.0) as client, filled(client):
        service.kill()

    def answer(*words: str) -> list[dict[str, object]]:
        done = txnbuf(*words, "--output", "json", environ={ADMIN: cluster.admin})
        assert (done.returncode, "as the log has it" in done.stderr) == (0, True), done.stderr
        found = json.loads(done.stdout)
        return found if isinstance(found, list) else [found]

    topics = {row["topic"]: row for row in answer("list", address)}
    assert {"gone", "orders", "open", "wide-partition-0"} <= {*topics}
    assert topics["open"]["open"] == 2
    assert [(row["group"], row["member"], row["lag"]) for row in answer("groups", "list", address)] == [
        ("cents", None, 0),
        ("old", None, 0),
    ]
    assert {row["cursor"] for row in answer("cursors", "list", address)} == {"cache", "later", "old"}
    assert answer("streams", address)[0]["connections"] == []
    (described,) = answer("describe", address, "wide")
    assert (described["topic"], described["partitions"], described["messages"]) == ("wide", 2, 0)
