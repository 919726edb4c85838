"""Fixtures of the tests in this directory, all on a real Pulsar: private brokers, and other programs' clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from plain_world import World, closing
from pulsar_cluster import Cluster
from several_brokers import Brokers, several_brokers

from bench.pulsar_broker import SETTINGS
from broker_io import open_broker
from broker_io.port import Broker
from broker_io.pulsar import reader as reader_module
from broker_io.standalone import Standalone, ask
from broker_plugin.build import build

HERE = Path(__file__).parent
SMALL_BYTES = 64 * 1024
SECONDS = 900
"""Default timeout of a test, in seconds; brokers start slowly on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Item | None) -> None:
    """End a private broker after its last test: an idle one takes a twentieth of a CPU."""
    if nextitem is None:
        return  # the session has ended, and its brokers with it
    for name in ("mortal", "odd_broker"):
        if name in item.funcargs and name not in getattr(nextitem, "fixturenames", ()):
            item.funcargs[name].kill()


WAIT_SECONDS = 30.0
"""Seconds for which a read without timeout waits for existing messages on a busy cluster."""


@pytest.fixture(autouse=True)
def patient_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers reach the end of a topic even if the cluster stalls for some seconds."""
    monkeypatch.setattr(reader_module, "RECONNECT_SECONDS", WAIT_SECONDS)


@pytest.fixture(scope="session")
def plug_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The jar of the broker plug-in."""
    return build(tmp_path_factory.mktemp("plugin") / "txnbuffer-broker.jar")


@pytest.fixture(scope="module")
def broker(request: pytest.FixtureRequest, cluster: Cluster, plug_in: Path) -> Iterator[Standalone]:
    """A broker with the plug-in and the settings BROKER of the module."""
    with cluster.private_standalone(request.module.BROKER, jar=plug_in) as started:
        yield started


@pytest.fixture(scope="module")
def brokers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, plug_in: Path
) -> Iterator[Brokers]:
    """Two brokers with the plug-in and the settings BROKER of the module."""
    with several_brokers(tmp_path_factory.mktemp("brokers"), 2, request.module.BROKER, plug_in) as started:
        yield started


@pytest.fixture(scope="module")
def world(broker: Standalone) -> Iterator[World]:
    yield from closing(World(broker))


@pytest.fixture(scope="session")
def private_broker(cluster: Cluster) -> Iterator[Standalone]:
    with cluster.private_standalone() as broker:
        yield broker
    assert not broker.alive


@pytest.fixture
def mortal(private_broker: Standalone) -> Standalone:
    """A broker that tests may kill and have to restart, shared by the tests of a worker."""
    if not private_broker.alive:
        private_broker.start()
    return private_broker


@pytest.fixture(scope="session")
def odd_broker(cluster: Cluster) -> Iterator[Standalone]:
    """A broker with a small message limit and with Pulsar's own transactions."""
    with cluster.private_standalone([*SETTINGS, f"maxMessageSize={SMALL_BYTES}"]) as broker:
        yield broker


@pytest.fixture
def opening(cluster: Cluster, namespace: str) -> Iterator[Callable[..., Broker]]:
    """Opens brokers of the test's namespace, each like that of another process."""
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
    """Sends REST requests about topic `orders`."""

    def ask_it(method: str, question: str, body: Any = None) -> Any:
        return ask(cluster.admin, f"persistent/{namespace}/orders/{question}", method, body)

    return ask_it
