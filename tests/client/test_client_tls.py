"""A client of a service with TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import self_signed

from txnbuffer import Outcome, ServiceUnavailable, connect
from txnbuffer.testing import ServiceProcess


def test_client_with_the_ca_certificate_writes_and_reads(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    service = ServiceProcess(str(tmp_path / "log"), "--tls-cert", cert, "--tls-key", key)
    service.start()
    try:
        with connect(service.address, tls_ca=cert) as client:
            with client.transaction() as txn:
                txn.send("log", b"secret")
            assert client.outcome(txn.id) is Outcome.COMMIT
            with client.reader("log") as reader:
                batch = reader.read(timeout=120)
                assert batch is not None
                assert [record.value for record in batch] == [b"secret"]
        with pytest.raises(ServiceUnavailable), connect(service.address, timeout=0.5, max_unavailable=0.5):
            raise AssertionError
    finally:
        service.kill()
