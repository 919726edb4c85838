"""Certificates for tests of TLS, created by openssl: an authority, certificates that it signs, a self-signed one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

DAYS = ["-days", "2"]
KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class Authority:
    """A certificate authority; `trust` is the file of its certificate, PEM."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self.trust, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        openssl("req", "-x509", *KEY, *DAYS, "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.trust)

    def sign(self, name: str) -> tuple[Path, Path]:
        """The files of a certificate for a server on this machine or a client of that name, and of its PKCS 8 key."""
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request, extensions = self._directory / f"{name}.csr", self._directory / "extensions"
        extensions.write_text(NAMES)
        openssl("req", "-new", *KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        by = ["-CA", self.trust, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions]
        openssl("x509", "-req", *DAYS, *by, "-in", request, "-out", certificate)
        return certificate, key


def self_signed(directory: Path) -> tuple[str, str]:
    """The files of a self-signed certificate of this machine and of its key."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    openssl(
        "req", "-x509", *KEY, *DAYS, "-subj", "/CN=localhost", "-addext", NAMES, "-keyout", key, "-out", certificate
    )
    return str(certificate), str(key)


def openssl(*words: str | Path) -> None:
    assert shutil.which("openssl"), "openssl, which creates the certificates, is missing: install it"
    subprocess.run(["openssl", *words], check=True, capture_output=True)
