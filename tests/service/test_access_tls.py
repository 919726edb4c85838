"""Client certificates: who they name, which are refused, and certificates that are replaced while the service runs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import certificates
import grpc
import pytest
from access_world import POLICY
from certificates import Authority, openssl
from grpc.experimental.session_cache import ssl_session_cache_lru
from service_setup import engine_on

from broker_io.errors import NotAuthorized, ServiceUnavailable, Unauthenticated, UntrustedService
from broker_io.memory import MemoryBroker
from broker_io.rpc.channel import VERSION_METADATA
from broker_io.rpc.credential_files import ClientCertificate, certificate_end
from broker_io.system import SystemClock
from broker_io.testing import SimulatedClock
from txnbuffer import connect
from txnbuffer.client.connection import PendingConnection
from txnbuffer.config import AccessConfig
from txnbuffer.service.door.access import Access
from txnbuffer.service.door.tls import ServerTls
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer

IMPATIENT = {"max_unavailable": 1.0, "timeout": 1.0}
"""Options of clients that are refused, and would try again for long."""


class TlsService:
    """A service that wants certificates of `authority`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory, "authority")
        certificate, key = self.authority.sign("service")
        self.tls = ServerTls(str(certificate), str(key), str(self.authority.trust))
        self.port = 0
        self.access: Access

    def connect(self, certificate: Path, key: Path, **options: Any) -> PendingConnection:
        return connect(
            f"txnbuf://localhost:{self.port}",
            tls_ca=str(self.authority.trust), tls_cert=str(certificate), tls_key=str(key), **options,
        )  # fmt: skip

    async def write(self, certificate: Path, key: Path, topic: str = "a", **options: Any) -> None:
        async with self.connect(certificate, key, **options) as client:
            await client.send(topic, b"v")

    async def refuses(self, certificate: Path, key: Path) -> None:
        with pytest.raises(ServiceUnavailable):
            await self.write(certificate, key, **IMPATIENT)


@asynccontextmanager
async def tls_service(directory: Path) -> AsyncIterator[TlsService]:
    service = TlsService(directory)
    (directory / "policy").write_text(POLICY)
    (directory / "policy").chmod(0o644)
    config = AccessConfig(policy=str(directory / "policy"), client_ca=service.tls.client_ca)
    async with engine_on(MemoryBroker()) as engine:
        access = service.access = Access(config, lambda event, **facts: None)
        server = GrpcServer(engine.limits, max_clients=10, access=access)
        service.tls.files.check()
        await server.start("127.0.0.1:0", service.tls)
        await server.serve(engine, ServiceAdmin(engine))
        service.port = server.port
        try:
            yield service
        finally:
            await server.stop()


async def test_certificate_names_the_principal(tmp_path: Path) -> None:
    async with tls_service(tmp_path) as service:
        await service.write(*service.authority.sign("writer"))
        with pytest.raises(NotAuthorized, match="'writer' may not write topic 'b'"):
            await service.write(*service.authority.sign("writer"), "b")
        with pytest.raises(NotAuthorized, match="'reader' may not write topic 'a'"):
            await service.write(*service.authority.sign("reader"))
        with pytest.raises(NotAuthorized, match="no rule of the policy names 'stranger'"):
            await service.write(*service.authority.sign("stranger"))


async def test_foreign_expired_and_missing_certificates_are_refused(tmp_path: Path) -> None:
    async with tls_service(tmp_path) as service:
        (other := tmp_path / "other").mkdir()
        foreign = Authority(other, "authority").sign("writer")
        certificate, key = service.authority.sign("writer")
        expired = tmp_path / "expired.pem"
        request = tmp_path / "again.csr"
        openssl("req", "-new", "-key", key, "-subj", "/CN=writer", "-out", request)
        by = ["-CA", service.authority.trust, "-CAkey", tmp_path / "authority.key", "-CAcreateserial"]
        when = ["-not_before", "20200101000000Z", "-not_after", "20200102000000Z"]
        try:
            openssl("x509", "-req", *when, *by, "-in", request, "-out", expired)
        except Exception:  # OpenSSL before 3.4 has no dates here
            openssl("x509", "-req", "-days", "-1", *by, "-in", request, "-out", expired)
        for one in (foreign, (expired, key)):
            await service.refuses(*one)
        with pytest.raises(ServiceUnavailable):
            await connect(f"txnbuf://localhost:{service.port}", tls_ca=service.tls.client_ca, **IMPATIENT)
        await service.write(certificate, key)


async def test_replaced_certificates_and_authorities_are_used_without_a_restart(tmp_path: Path) -> None:
    async with tls_service(tmp_path) as service:
        old = service.authority
        writer = old.sign("writer")
        await service.write(*writer)
        (other := tmp_path / "other").mkdir()
        new = Authority(other, "new")
        certificate, key = new.sign("service")
        certificate.replace(service.tls.certificate)
        await asyncio.sleep(0)
        await service.write(*writer)  # the key does not fit yet: the old pair is in use
        key.replace(service.tls.key)
        with pytest.raises(UntrustedService):
            await service.write(*writer)
        service.authority = new
        await service.write(*writer)  # the service trusts the old authority of clients still
        Path(service.tls.client_ca).write_bytes(new.trust.read_bytes())
        await service.refuses(*writer)
        await service.write(*new.sign("writer"))


async def test_an_expired_certificate_opens_no_connection_by_a_resumed_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tls_service(tmp_path) as service:
        certificate, key = service.authority.sign("writer")
        files = [path.read_bytes() for path in (service.authority.trust, key, certificate)]
        resumed: list[bytes] = []
        of_call = ClientCertificate.of_call

        def noted(context: Any) -> ClientCertificate | None:
            resumed.extend(context.auth_context()["ssl_session_reused"])
            return of_call(context)

        monkeypatch.setattr(ClientCertificate, "of_call", noted)
        options = [("grpc.ssl_session_cache", ssl_session_cache_lru(1)), ("grpc.use_local_subchannel_pool", 1)]

        def call() -> None:
            target = f"localhost:{service.port}"
            with grpc.secure_channel(target, grpc.ssl_channel_credentials(*files), options) as channel:
                status = channel.unary_unary("/txnbuffer.v1.Admin/Status")
                status(b"", metadata=VERSION_METADATA, timeout=60.0)

        await asyncio.to_thread(call)
        await asyncio.to_thread(call)
        caller = service.access.authenticate(None, ClientCertificate("writer", certificate_end(files[2])), "peer")
        later = SystemClock().now_ms() + 3 * 86_400_000
        service.access._authenticator._clock = SimulatedClock(later)
        with pytest.raises(grpc.RpcError, match="the client certificate has expired") as refused:
            await asyncio.to_thread(call)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert resumed == [b"false", b"true", b"true"]
        with pytest.raises(Unauthenticated, match="the client certificate has expired"):
            service.access.check_valid(caller)  # of a session or a stream that is open


@pytest.mark.parametrize("days", ["2", "20000"])  # in the second one the year has four digits
def test_the_end_of_a_certificate_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: str) -> None:
    monkeypatch.setattr(certificates, "DAYS", ["-days", days])
    authority = Authority(tmp_path, "authority")
    for path in (authority.trust, authority.sign("writer")[0]):
        asked = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", path], check=True, capture_output=True)
        stated = ssl.cert_time_to_seconds(asked.stdout.decode().strip().removeprefix("notAfter="))
        assert certificate_end(path.read_bytes()) == stated
    for broken in (b"", b"x", path.read_bytes()[:200], ssl.DER_cert_to_PEM_cert(b"\x30\x84").encode()):
        assert certificate_end(broken) == 0  # so it has expired


def test_sessions_of_tls_are_not_resumed_over_http(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("service")
    server = ServerTls(str(certificate), str(key), str(authority.trust)).context()
    client = ssl.create_default_context(cafile=str(authority.trust))
    client.load_cert_chain(*map(str, authority.sign("writer")))
    session = None
    for _ in range(2):
        pairs = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = client.wrap_bio(*pairs, server_hostname="localhost", session=session)
        theirs = server.wrap_bio(*pairs[::-1], server_side=True)
        for _ in range(4):
            for one in (ours, theirs):
                with contextlib.suppress(ssl.SSLWantReadError):
                    one.do_handshake()
        theirs.write(b"x")
        assert ours.read(1) == b"x"
        session = ours.session
        assert not ours.session_reused
    assert theirs.getpeercert()
