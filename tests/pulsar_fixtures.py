"""Fixtures of tests on a real Pulsar: the shared cluster, and a namespace per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pulsar_cluster import Cluster, shared

from broker_io.standalone import NoPulsar


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster shared by all workers of this run; without one, tests fail with instructions."""
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
