"""Files about credentials that a configuration names: certificates and keys for TLS (PEM), passwords, tokens

They are checked when a process starts: what TLS reports later names neither the file nor the setting, and is repeated
for ever.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

from broker_io.errors import EnvironmentFault
from broker_io.permissions import read_checked


class CredentialFile(NamedTuple):
    """A file, and the setting that names it."""

    path: str
    setting: str

    def read(self, *, secret: bool = False) -> bytes:
        """The content. Raises EnvironmentFault, also for loose permissions."""
        try:
            return read_checked(self.path, secret=secret)
        except OSError as error:
            raise EnvironmentFault(f"can't read {self.path} ({self.setting}): {error.strerror}") from error

    def read_password(self) -> str:
        """The password in the file, without white space around it. Raises EnvironmentFault."""
        try:
            password = self.read(secret=True).decode().strip()
        except UnicodeDecodeError:
            password = ""
        if not password:
            raise EnvironmentFault(f"{self.path} ({self.setting}) has no password in UTF-8: write it there")
        return password


def check_authority(authority: CredentialFile) -> None:
    """Raises EnvironmentFault for a file that can't be read, or has no certificate."""
    authority.read()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=authority.path)
    except ssl.SSLError as error:
        raise EnvironmentFault(
            f"{authority.path} is not a PEM certificate ({authority.setting}; {error.reason})"
        ) from None


def check_certificate(certificate: CredentialFile, key: CredentialFile) -> None:
    """Raises EnvironmentFault for files that can't be read, and for a key that is not that of the certificate."""
    key.read(secret=True)
    check_authority(certificate)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate.path, key.path, password=b"")
    except ssl.SSLError as error:
        raise EnvironmentFault(
            f"{key.path} is not an unencrypted PEM private key of certificate {certificate.path} "
            f"({key.setting}; {error.reason})"
        ) from None
