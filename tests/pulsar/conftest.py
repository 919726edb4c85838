"""What tests on a real Pulsar share: the cluster, and a namespace of each test's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from pulsar_cluster import Cluster, shared

from bench.pulsar_broker import SETTINGS
from broker_io import open_broker
from broker_io.port import Broker
from broker_io.pulsar import reader as reader_module
from broker_io.testing.standalone import NoPulsar, Standalone, ask

HERE = Path(__file__).parent
SMALL_BYTES = 64 * 1024
SECONDS = 900
"""A test has that long, unless it says otherwise: brokers start slowly where others keep the processors busy."""


SHARED = ("spark", "mortal", "odd_broker")
"""Fixtures of a session that take long to start: modules that use one come one after the other, on one worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [(index, item) for index, item in enumerate(items) if item.path.is_relative_to(HERE)]
    ranks: dict[Path, int] = {}
    for _, item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))
        used = [rank for rank, name in enumerate(SHARED) if name in getattr(item, "fixturenames", ())]
        ranks[item.path] = min([ranks.get(item.path, len(SHARED)), *used])
    in_order = sorted((item for _, item in ours), key=lambda item: ranks[item.path])
    for (index, _), item in zip(ours, in_order, strict=True):
        items[index] = item


WAIT_SECONDS = 30.0
"""So long a read without patience waits for what is there, however busy the cluster is."""


@pytest.fixture(autouse=True)
def patient_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in a topic is read to its end though the cluster stalls for some seconds."""
    monkeypatch.setattr(reader_module, "RECONNECT_SECONDS", WAIT_SECONDS)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster that all workers of this run share; without one, tests fail with what to do."""
    directory = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        directory = directory.parent
    try:
        with shared(directory) as found:
            yield found
    except NoPulsar as failure:
        pytest.fail(str(failure), pytrace=False)


@pytest.fixture(scope="session")
def private_broker(cluster: Cluster) -> Iterator[Standalone]:
    with cluster.private_standalone() as broker:
        yield broker
    assert not broker.alive


@pytest.fixture
def mortal(private_broker: Standalone) -> Standalone:
    """A broker to be killed, and started again by whoever did it; those of a worker share it."""
    if not private_broker.alive:
        private_broker.start()
    return private_broker


@pytest.fixture(scope="session")
def odd_broker(cluster: Cluster) -> Iterator[Standalone]:
    """One that takes small messages only and has transactions of its own."""
    with cluster.private_standalone([*SETTINGS, f"maxMessageSize={SMALL_BYTES}"]) as broker:
        yield broker


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """`public/…`, fresh."""
    name = cluster.namespace()
    yield name
    cluster.drop(name)


@pytest.fixture
def opening(cluster: Cluster, namespace: str) -> Iterator[Callable[..., Broker]]:
    """Opens brokers of the test's namespace, each of which is as another process."""
    opened: list[Broker] = []

    def open_one(**options: Any) -> Broker:
        opened.append(open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin, **options))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[pulsar.Client]:
    """Another program's."""
    made = pulsar.Client(cluster.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    yield made
    made.close()


@pytest.fixture
def asking(cluster: Cluster, namespace: str) -> Callable[..., Any]:
    """Asks the REST interface about topic `orders`."""

    def ask_it(method: str, question: str, body: Any = None) -> Any:
        return ask(cluster.admin, f"persistent/{namespace}/orders/{question}", method, body)

    return ask_it
