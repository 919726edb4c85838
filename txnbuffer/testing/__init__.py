"""Fixtures for the tests of applications: `pytest_plugins = ["txnbuffer.testing"]` in a conftest.py.

`txnbuf_service` is a service in a separate process, which tests connect to at its `address`, kill and restart.
`txnbuf_address` is the address of an embedded log for the process of the tests. Both store in `tmp_path`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from txnbuffer.testing.service import ServiceProcess

__all__ = ["ServiceProcess", "txnbuf_address", "txnbuf_service"]


@pytest.fixture
def txnbuf_service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A running service on an empty directory in `tmp_path`; it is killed when the test ends."""
    service = ServiceProcess(str(tmp_path / "txnbuf"))
    service.start()
    yield service
    service.kill()


@pytest.fixture
def txnbuf_address(tmp_path: Path) -> str:
    """`file:DIR` of an empty directory: data persists between the connections of a test; one is open at a time."""
    return f"file:{tmp_path / 'txnbuf'}"
