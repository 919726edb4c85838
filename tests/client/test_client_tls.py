"""A client of a service with TLS."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from certificates import Authority, openssl, self_signed
from service_process import ServiceProcess as RunningService

from broker_io import open_broker
from broker_io.errors import UntrustedService
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


def test_mistakes_with_certificates_are_named(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    cert, key = ours.sign("service")
    files = ["--tls-cert", str(cert), "--tls-key", str(key)]
    with RunningService(tmp_path / "tls", *files) as tls, RunningService(tmp_path / "plain") as plain:
        began = time.monotonic()
        with pytest.raises(UntrustedService, match=r"does not verify.*CERTIFICATE_VERIFY_FAILED"):
            connect(f"txnbuf://127.0.0.1:{tls.port}", tls_ca=str(other.trust)).open_sync()
        with pytest.raises(UntrustedService, match=r"does not verify.*CERTIFICATE_VERIFY_FAILED"):
            open_broker(f"txnbuf://127.0.0.1:{tls.port}", root_certificates=other.trust.read_bytes())
        assert time.monotonic() - began < 25.0  # such a service is not waited for, for 60 and 30 s
        for port, trust, reason in (
            (tls.port, None, r"Socket closed; if the service uses TLS"),
            (plain.port, str(ours.trust), r"WRONG_VERSION_NUMBER.*does not use TLS"),
        ):
            with pytest.raises(ServiceUnavailable, match=reason):
                connect(f"txnbuf://127.0.0.1:{port}", tls_ca=trust, max_unavailable=0.5, timeout=2.0).open_sync()


def test_a_host_name_that_is_not_in_the_certificate_is_an_error_at_once(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=example.com"]
    openssl(*words, "-addext", "subjectAltName=DNS:example.com", "-keyout", key, "-out", cert)
    with (
        RunningService(tmp_path / "log", "--tls-cert", str(cert), "--tls-key", str(key)) as service,
        pytest.raises(UntrustedService, match="Hostname Verification Check failed"),
    ):
        connect(f"txnbuf://127.0.0.1:{service.port}", tls_ca=str(cert)).open_sync()
