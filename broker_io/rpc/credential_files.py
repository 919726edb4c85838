"""Files about credentials that a configuration names: certificates and keys for TLS (PEM), passwords, tokens

They are checked when a process starts: what TLS reports later names neither the file nor the setting, and is repeated
for ever.
"""

from __future__ import annotations

import ssl
from typing import Any, NamedTuple

from broker_io.environment import current
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

    def identity(self) -> tuple[int, ...] | None:
        """A value that changes with the file and with its permissions; None if it is not there."""
        disk = current().disk
        try:
            return (*disk.identity(self.path), disk.permissions(self.path))
        except OSError:
            return None

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


class TlsFiles(NamedTuple):
    """The files for TLS of one side; with an authority, the other side needs a certificate of it."""

    certificate: CredentialFile
    key: CredentialFile
    authority: CredentialFile | None = None

    def check(self) -> None:
        """Raises EnvironmentFault, naming the file, for one that can't be used."""
        self.certificate.read()
        check_certificate(self.certificate, self.key)
        if self.authority is not None:
            check_authority(self.authority)

    def identity(self) -> tuple[object, ...]:
        """A value that changes with the files."""
        return tuple(file.identity() for file in self if file is not None)

    def read(self) -> tuple[bytes | None, bytes, bytes]:
        """Authority, key and certificate, as gRPC takes them. Raises EnvironmentFault."""
        authority = None if self.authority is None else self.authority.read()
        return authority, self.key.read(secret=True), self.certificate.read()

    def server_credentials(self) -> Any:
        """Credentials for a gRPC server, which uses files that have changed for its next connection.

        Files that can't be used leave the last ones in use. Raises EnvironmentFault.
        """
        import grpc

        lock, used = current().threads.lock(), self.identity()

        def configuration() -> Any:
            self.check()
            authority, key, certificate = self.read()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

        def changed() -> Any:
            # Each handshake asks. gRPC replaces what it has with every answer, also while other handshakes use it, and
            # many at once have crashed it: so it gets one answer for each change.
            nonlocal used
            with lock:
                found = self.identity()
                if found == used:
                    return None
                used = found
                try:
                    return configuration()
                except EnvironmentFault:  # while the files are replaced
                    return None

        return grpc.dynamic_ssl_server_credentials(
            configuration(), changed, require_client_authentication=self.authority is not None
        )
