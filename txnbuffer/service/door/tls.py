"""TLS of the service: its certificate, and the authority of its clients' certificates

Certificates and keys are replaced without a restart: the servers read the files again when they have changed. While one
of them can't be used, connections get the last ones that could.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

from broker_io.rpc.credential_files import CredentialFile, TlsFiles, Watched
from txnbuffer.errors import EnvironmentFault


class ServerTls(NamedTuple):
    """Files (PEM): certificate chain and key of the service; `client_ca`: clients need certificates of it, if given."""

    certificate: str
    key: str
    client_ca: str = ""

    @property
    def files(self) -> TlsFiles:
        """The files, with the settings that name them."""
        return TlsFiles(
            CredentialFile(self.certificate, "service.tls_cert"),
            CredentialFile(self.key, "service.tls_key"),
            CredentialFile(self.client_ca, "access.client_ca") if self.client_ca else None,
        )

    def context(self) -> ssl.SSLContext:
        """A context for a server that asks for client certificates, but does not require them.

        Raises EnvironmentFault.
        """
        self.files.check()
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


class WatchedTls(Watched[ssl.SSLContext]):
    """The TLS of a running service. Raises EnvironmentFault."""

    def __init__(self, tls: ServerTls) -> None:
        self.tls = tls
        super().__init__(tls.files.identity, tls.context)

    def server_context(self) -> ssl.SSLContext:
        """A context for a server, of which each new connection uses the files that are in use then."""
        context = self.tls.context()

        def newest(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = self.value

        context.sni_callback = newest
        return context
