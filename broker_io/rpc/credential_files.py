"""Files about credentials that a configuration names: certificates and keys for TLS (PEM), passwords, tokens

They are checked when a process starts: what TLS reports later names neither the file nor the setting, and is repeated
for ever.
"""

from __future__ import annotations

import functools
import hashlib
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from broker_io.environment import current
from broker_io.errors import EnvironmentFault, Error
from broker_io.permissions import read_checked

T = TypeVar("T")


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

    def watched(self, parse: Callable[[bytes, str], T], *, secret: bool) -> Watched[T]:
        """The content as `parse` makes it of bytes and path, made again when the file has changed.

        Raises EnvironmentFault, and the error of `parse`, for a file that can't be used at the start.
        """
        return Watched(self.identity, lambda: parse(self.read(secret=secret), self.path))

    def identity(self) -> tuple[int, bytes] | None:
        """Permissions and a digest of the content, as times and sizes may stay the same; None if it can't be read."""
        disk = current().disk
        try:
            return disk.permissions(self.path), hashlib.sha256(disk.read(self.path)).digest()
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


class Watched(Generic[T]):
    """What is made of files, `value`, and made again when they have changed.

    `identity` changes with the files. Raises what `load` raises at the start. Later an error leaves the last value in
    use: `problem` is that error.
    """

    def __init__(self, identity: Callable[[], object], load: Callable[[], T]) -> None:
        self.problem: Error | None = None
        self._identity = identity
        self._load = load
        self._seen = identity()
        self.value = load()

    def refresh(self) -> bool:
        """Load the files again if they have changed; whether `value` is another one now."""
        seen = self._identity()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.value = self._load()
        except Error as error:
            self.problem = error
            return False
        self.problem = None
        return True


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

        def configuration() -> Any:
            self.check()
            authority, key, certificate = self.read()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

        lock, used = current().threads.lock(), Watched(self.identity, configuration)

        def changed() -> Any:
            # Each handshake asks. gRPC replaces what it has with every answer, also while other handshakes use it, and
            # many at once have crashed it: so it gets one answer for each change.
            with lock:
                return used.value if used.refresh() else None

        return grpc.dynamic_ssl_server_credentials(
            used.value, changed, require_client_authentication=self.authority is not None
        )


class ClientCertificate(NamedTuple):
    """The common name in the certificate of a caller, and when it expires, in seconds since 1970."""

    name: str | None
    expires: int

    @classmethod
    def of_call(cls, context: Any) -> ClientCertificate | None:
        """The certificate of a gRPC call; None if its connection has none.

        The caller of this checks when it expires: gRPC verifies it only when a TLS session begins, and lets clients
        resume one for hours.
        """
        found = context.auth_context()
        if not (pem := found.get("x509_pem_cert")):
            return None
        name = next(iter(found.get("x509_common_name", ())), None)
        return cls(None if name is None else name.decode(), certificate_end(pem[0]))


UTC_TIME = 0x17
"""The tag of a time whose year has two digits."""


@functools.lru_cache(4096)
def certificate_end(pem: bytes) -> int:
    """When a certificate expires, in seconds since 1970; 0 if that can't be read."""
    try:
        der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
        at = _element(der, _element(der, 0)[1])[1]
        for _ in range(4 if der[at] == 0xA0 else 3):  # version, serial number, signature algorithm, issuer
            at = _element(der, at)[2]
        tag, start, end = _element(der, _element(der, _element(der, at)[1])[2])
        text = der[start:end].decode("ascii")
        if tag == UTC_TIME:
            text = ("20" if text < "50" else "19") + text
        return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())
    except (ValueError, IndexError):
        return 0


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of an element in DER, and where its content begins and ends."""
    tag, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start])
    return tag, start, start + size
