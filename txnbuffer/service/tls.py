"""TLS of the service: its certificate, and the authority of its clients' certificates

Certificates and keys are replaced without a restart: gRPC reads the files again for each connection, and other servers
when they have changed. While one of them can't be used, connections get the last ones that could.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Any, NamedTuple

from broker_io.rpc.credential_files import CredentialFile, check_authority, check_certificate
from txnbuffer.access.files import file_identity
from txnbuffer.errors import EnvironmentFault, Error


class ServerTls(NamedTuple):
    """Files (PEM): certificate chain and key of the service; `client_ca`: clients need certificates of it, if given."""

    certificate: str
    key: str
    client_ca: str = ""

    def check(self) -> None:
        """Raises EnvironmentFault, naming the file, for one that can't be used."""
        certificate, key, authority = self._files
        certificate.read()
        check_certificate(certificate, key)
        if authority is not None:
            check_authority(authority)

    def context(self) -> ssl.SSLContext:
        """A context for a server that asks for client certificates, but does not require them.

        Raises EnvironmentFault.
        """
        self.check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session would not verify the certificate of the client again, which may have expired since.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        try:
            context.load_cert_chain(self.certificate, self.key, password=b"")
            if self.client_ca:
                context.load_verify_locations(cafile=self.client_ca)
                context.verify_mode = ssl.CERT_OPTIONAL
        except OSError as error:  # replaced since the check
            raise EnvironmentFault(f"cannot read the files of TLS: {error.strerror}") from error
        return context

    def credentials(self) -> Any:
        """Credentials for a gRPC server, which requires client certificates if there is a `client_ca`."""
        import grpc

        def configuration() -> Any:
            certificate, key, authority = self._read()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

        def again() -> Any:
            with suppress(Error):  # while the files are replaced
                self.check()
                return configuration()
            return None

        return grpc.dynamic_ssl_server_credentials(
            configuration(), again, require_client_authentication=bool(self.client_ca)
        )

    @property
    def _files(self) -> tuple[CredentialFile, CredentialFile, CredentialFile | None]:
        """Certificate, key and CA."""
        authority = CredentialFile(self.client_ca, "access.client_ca") if self.client_ca else None
        return (
            CredentialFile(self.certificate, "service.tls_cert"),
            CredentialFile(self.key, "service.tls_key"),
            authority,
        )

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        certificate, key, authority = self._files
        return certificate.read(), key.read(secret=True), None if authority is None else authority.read()


class WatchedTls:
    """The TLS of a running service. `problem`: why files that have changed are not in use.

    Raises EnvironmentFault.
    """

    def __init__(self, files: ServerTls) -> None:
        self.files = files
        self.problem: Error | None = None
        self._seen = self._identity()
        self._context = files.context()

    def refresh(self) -> bool:
        """Read the files again if one has changed; whether others are in use now."""
        seen = self._identity()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self._context = self.files.context()
        except Error as error:
            self.problem = error
            return False
        self.problem = None
        return True

    def server_context(self) -> ssl.SSLContext:
        """A context for a server, of which each new connection uses the files that are in use then."""
        context = self.files.context()

        def newest(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = self._context

        context.sni_callback = newest
        return context

    def _identity(self) -> tuple[object, ...]:
        return tuple(file_identity(path) for path in self.files if path)
