"""How a client of a service knows the service, and proves who it is: CA certificate, client certificate, token

A token is sent as the metadata `authorization: Bearer TOKEN` of each call, and never without TLS to another machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from broker_io.errors import EnvironmentFault, InvalidAddress
from broker_io.permissions import read_checked

AUTHORIZATION = "authorization"


class ClientCredentials(NamedTuple):
    """With `root_certificates` the connection uses TLS; `certificate` and `key` are the client's own (all PEM).

    `token`: its text, or a function that returns it for one call. `optional`: no token is sent where it would not be
    encrypted.
    """

    root_certificates: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    token: str | Callable[[], str] | None = None
    optional: bool = False

    def __repr__(self) -> str:
        """Without secrets."""
        given = [name for name, value in self._asdict().items() if value]
        return f"{type(self).__name__}({', '.join(given)})"

    def channel_credentials(self) -> Any:
        """The credentials of gRPC for a channel; None for one without TLS."""
        import grpc

        if self.root_certificates is None:
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.key, self.certificate)

    def metadata(self, target: str, *, local: bool) -> tuple[tuple[str, str], ...]:
        """The metadata of a call to HOST:PORT, which is `local` if only this machine reaches it.

        Raises InvalidAddress, and EnvironmentFault for an unreadable file.
        """
        if self.token is None:
            return ()
        if self.root_certificates is None and not local:
            if self.optional:
                return ()
            raise InvalidAddress(f"the token would be sent to {target} without encryption: give the CA certificate")
        return ((AUTHORIZATION, f"Bearer {self.token() if callable(self.token) else self.token}"),)


NO_CREDENTIALS = ClientCredentials()


def token_of_file(path: str | os.PathLike[str]) -> Callable[[], str]:
    """A function that returns the token in a file, which is read again for each call."""
    name = os.fspath(path)

    def read() -> str:
        try:
            text = read_checked(name, secret=True).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise EnvironmentFault(f"can't read the token in {name}: {why}") from None
        if not text.isascii() or not text.isprintable() or " " in text or not text:
            raise EnvironmentFault(f"{name} has no token: write one, on one line")
        return text

    return read
