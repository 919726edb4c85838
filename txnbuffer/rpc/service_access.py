"""The files and the token with which a client or a command connects to a service"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_io.rpc.credential_files import CredentialFile
from broker_io.rpc.credentials import ClientCredentials, token_of_file
from txnbuffer.errors import InvalidRequest
from txnbuffer.rpc.discovery import read_ca_file


@dataclass(frozen=True, slots=True)
class ServiceAccess:
    """Paths of PEM files, and a token: its text, a function that returns it, or the path of its file."""

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    token_file: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest for a wrong combination."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("a client certificate needs its key: give tls_cert and tls_key")
        if self.tls_cert is not None and self.tls_ca is None:
            raise InvalidRequest("a client certificate needs TLS: give tls_ca, the CA certificate of the service")
        if self.token is not None and self.token_file is not None:
            raise InvalidRequest("token and token_file exclude each other: give one of them")
        if not (self.token is None or callable(self.token) or isinstance(self.token, str)):
            raise InvalidRequest(f"token must be text or a function, got {type(self.token).__name__}")
        if isinstance(self.token, str) and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InvalidRequest("token must be printable ASCII without line ends, got other text")

    @property
    def has_files(self) -> bool:
        """Whether `load` reads files."""
        return any(path is not None for path in (self.tls_ca, self.tls_cert, self.tls_key))

    def load(self, cluster: Mapping[str, Any] | None = None) -> ClientCredentials:
        """Read the files. `cluster`: options of `open_broker` whose token is used if none is given.

        Raises InvalidConfiguration and EnvironmentFault for a file that can't be used.
        """
        token = _source(self.token, self.token_file)
        optional = token is None and cluster is not None
        if optional and cluster is not None:
            token = _source(cluster.get("token") or None, cluster.get("token_file") or None)
        ca = None if self.tls_ca is None else read_ca_file(self.tls_ca)
        certificate, key = (
            None if path is None else CredentialFile(os.fspath(path), setting).read(secret=setting == "tls_key")
            for path, setting in ((self.tls_cert, "tls_cert"), (self.tls_key, "tls_key"))
        )
        return ClientCredentials(ca, certificate, key, token, optional)


def _source(token: Any, path: str | None) -> str | Callable[[], str] | None:
    return token if path is None else token_of_file(path)


def broker_options_of(credentials: ClientCredentials) -> dict[str, Any]:
    """The options of `open_broker` for a service."""
    given = credentials._asdict()
    del given["optional"]
    return {name: value for name, value in given.items() if value is not None}


NO_ACCESS = ServiceAccess()
