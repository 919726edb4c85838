"""Fixtures for the tests of applications: `pytest_plugins = ["txnbuffer.testing"]` in a conftest.py.

`txnbuf_service` is a service of its own process on a temporary directory, to connect to at its `address`
and to kill and restart; `txnbuf_address` is the address of an embedded log in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from txnbuffer.testing.service import ServiceProcess

__all__ = ["ServiceProcess", "txnbuf_address", "txnbuf_service"]


@pytest.fixture
def txnbuf_service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A running service; what it stores goes away with the test."""
    service = ServiceProcess(str(tmp_path / "txnbuf"))
    service.start()
    yield service
    service.kill()


@pytest.fixture
def txnbuf_address(tmp_path: Path) -> str:
    """`file:DIR` of an empty directory: `connect` to it owns it, and it stays from one connection to the next."""
    return f"file:{tmp_path / 'txnbuf'}"
