"""The CA file of a client: the certificates by which it trusts a service."""

from __future__ import annotations

import os
from pathlib import Path

from txnbuffer.errors import InvalidConfiguration


def read_ca_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a PEM file of certificates. Raises InvalidConfiguration."""
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"can't read the certificates to trust in {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise InvalidConfiguration(f"{path} holds no certificate in PEM: name the file of the one to trust")
    return found
