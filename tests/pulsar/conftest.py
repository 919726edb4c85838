"""What tests on a real Pulsar share: the cluster, and a namespace of each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pulsar_cluster import Cluster, shared

from broker_io.testing.standalone import NoPulsar

HERE = Path(__file__).parent
SECONDS = 900
"""A test has that long, unless it says otherwise: brokers start slowly where others keep the processors busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


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


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """`public/…`, fresh."""
    name = cluster.namespace()
    yield name
    cluster.drop(name)
