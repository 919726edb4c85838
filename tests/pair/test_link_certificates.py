"""A caller of the link of a pair whose certificate has expired, as gRPC lets one resume a TLS session"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from certificates import Authority

from broker_io.errors import Error
from broker_io.filelog.pair import transport as transport_module
from broker_io.filelog.pair.transport import VERSION, VERSION_KEY, GrpcTransport, LinkSettings
from broker_io.system import SystemClock


def test_an_expired_certificate_makes_no_call_of_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("live")
    files = {"certificate": str(certificate), "key": str(key), "authority": str(authority.trust)}
    transport = GrpcTransport(LinkSettings("orders", "localhost:7000", "localhost:7001", **files))
    auth = {"x509_pem_cert": [certificate.read_bytes()], "x509_subject_alternative_name": [b"localhost"]}
    metadata = [(VERSION_KEY, str(VERSION)), (transport_module.PAIR_KEY, b"orders")]
    call = SimpleNamespace(auth_context=lambda: auth, invocation_metadata=lambda: metadata, peer=lambda: "peer")

    def refuse(_: object, error: Error) -> None:
        raise error

    monkeypatch.setattr(transport_module, "_refuse", refuse)
    transport._check_call(call)
    later = SystemClock().now_ms() + 3 * 86_400_000
    transport._environment = SimpleNamespace(clock=SimpleNamespace(now_ms=lambda: later))  # type: ignore[assignment]  # only the clock is asked
    with pytest.raises(Error, match="the certificate of the calling member has expired"):
        transport._check_call(call)
