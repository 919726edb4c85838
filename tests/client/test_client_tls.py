"""A client of a service with TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from txnbuffer import Outcome, ServiceUnavailable, connect
from txnbuffer.testing import ServiceProcess


def certificate(directory: Path) -> tuple[str, str]:
    """Files of a new certificate for 127.0.0.1 and of its key."""
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = [openssl, "req", "-x509", *kind, *subject, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_a_client_that_trusts_the_certificate_writes_and_reads(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
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
        with pytest.raises(ServiceUnavailable), connect(service.address, timeout=0.5):
            raise AssertionError
    finally:
        service.kill()
