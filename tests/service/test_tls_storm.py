"""Many TLS handshakes at once, without a credential, while the certificate is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
from pathlib import Path

from certificates import Authority
from service_process import ServiceProcess

from txnbuffer import connect

HANDSHAKES = 600
AT_ONCE = 40
REPLACED_EVERY = 100
"""Handshakes between two replacements of the certificate."""


def replace(certificate: Path) -> None:
    """Another file with the same certificate."""
    new = certificate.with_suffix(".new")
    shutil.copy(certificate, new)
    os.replace(new, certificate)


async def storm(port: int, certificate: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    begun = 0

    async def client() -> None:
        nonlocal begun
        while begun < HANDSHAKES:
            begun += 1
            if begun % REPLACED_EVERY == 0:
                replace(certificate)
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.transport.abort()

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


def test_service_survives_many_handshakes_at_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("service")
    with ServiceProcess(tmp_path / "log", "--tls-cert", str(certificate), "--tls-key", str(key)) as service:
        service.wait_serving()
        asyncio.run(storm(service.port, certificate))
        assert service.process.poll() is None
        with connect(f"txnbuf://localhost:{service.port}", tls_ca=str(authority.trust)) as client:
            client.send("a", b"v")
