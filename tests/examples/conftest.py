"""Fixtures of the tests of examples: each runs on an embedded log, with a service, and on a real Pulsar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.example_process import Shop, shop, shop_on_a_cluster

from txnbuffer.testing import ServiceProcess

HERE = Path(__file__).parent
SECONDS = 900
"""Timeout of a test, in seconds; brokers start slowly on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(params=["file", "service", "cluster"])
def market(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A log in a directory, a service that owns one, and a namespace of a cluster with a service."""
    match request.param:
        case "file":
            with shop(f"file:{tmp_path / 'data'}", tmp_path) as opened:
                yield opened
        case "service":
            service: ServiceProcess = request.getfixturevalue("txnbuf_service")
            with shop(service.address, tmp_path) as opened:
                yield opened
        case _:
            cluster, namespace = map(request.getfixturevalue, ("cluster", "namespace"))
            with shop_on_a_cluster(cluster, namespace, tmp_path) as opened:
                yield opened
