"""Fixtures of the tests of exports: two topics with an owner while Spark reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from export_world import living
from pipeline_world import Life

from broker_io.port import Broker


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[list[Life]]:
    with living(tmp_path) as lives:
        yield lives


@pytest.fixture
def broker(lives: list[Life]) -> Broker:
    """The broker of `lives`."""
    return lives[0].broker
