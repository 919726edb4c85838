"""The service that tests of applications are given: nobody takes its port while it is not there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from txnbuffer.testing import ServiceProcess


def test_port_stays_reserved_between_two_runs(tmp_path: Path) -> None:
    service = ServiceProcess(str(tmp_path))
    port = service.port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    service.start()
    try:
        assert service.port == port
        service.restart()
        assert service.port == port
    finally:
        service.kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
