"""Settings and fixtures of the service tests."""

from __future__ import annotations

import pytest

from broker_io import open_broker
from txnbuffer.service.engine import engine


@pytest.fixture(params=["memory", "file"])
def broker(request, tmp_path):
    address = "memory:" if request.param == "memory" else f"file:{tmp_path / 'log'}"
    with open_broker(address) as opened:
        yield opened


@pytest.fixture
def quick(monkeypatch):
    """Tick the timers often."""
    monkeypatch.setattr(engine, "TICK", 0.02)
