"""Fixtures of the tests of examples, all on a real Pulsar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.example_process import Shop, shop
from pulsar_cluster import Cluster

HERE = Path(__file__).parent
SECONDS = 900
"""Timeout of a test, in seconds; brokers start slowly on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture
def market(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Shop]:
    """A namespace with a service, in which examples run."""
    with shop(cluster, namespace, tmp_path) as opened:
        yield opened
