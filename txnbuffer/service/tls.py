"""TLS of the service: its certificate, and the authority of its clients' certificates

The files are read again for each connection, so that certificates and keys are replaced without a restart. While one
of them can't be used, connections get the last ones that could.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from broker_io.rpc.credential_files import CredentialFile, check_authority, check_certificate
from txnbuffer.access.files import read_checked
from txnbuffer.errors import Error


class ServerTls(NamedTuple):
    """Files (PEM): certificate chain and key of the service; `client_ca`: clients need certificates of it, if given."""

    certificate: str
    key: str
    client_ca: str = ""

    def check(self) -> None:
        """Raises InvalidConfiguration and EnvironmentFault, naming the file, for one that can't be used."""
        self._read()
        check_certificate(
            CredentialFile(self.certificate, "service.tls_cert"), CredentialFile(self.key, "service.tls_key")
        )
        if self.client_ca:
            check_authority(CredentialFile(self.client_ca, "access.client_ca"))

    def credentials(self) -> Any:
        """Credentials for a gRPC server."""
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

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        certificate = read_checked(self.certificate, "the certificate", secret=False)
        key = read_checked(self.key, "the private key", secret=True)
        authority = None
        if self.client_ca:
            authority = read_checked(self.client_ca, "the CA of client certificates", secret=False)
        return certificate, key, authority
