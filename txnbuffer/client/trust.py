"""Whom a client trusts as its service: a file of certificates."""

from __future__ import annotations

import os
from pathlib import Path

from txnbuffer.errors import InvalidConfiguration


def certificates(path: str | os.PathLike[str]) -> bytes:
    """What stands in a file of certificates, PEM. Raises InvalidConfiguration."""
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"can't read the certificates to trust in {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise InvalidConfiguration(f"{path} holds no certificate in PEM: name the file of the one to trust")
    return found
