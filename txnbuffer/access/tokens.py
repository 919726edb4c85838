"""Tokens that the service issues itself: their text, and the file with their hashes. Pure.

A token is `txnb_ID_SECRET`: 12 and 64 hexadecimal digits. Its secret is random, so one round of SHA-256 protects it.
The file has one line for each token, with fields between tabs, after a head:

    # txnbuffer tokens 1: id, principal, SHA-256 of the secret, created, expires
    3f1c9a0b2d4e	orders	9f86d081…	2026-11-27T20:00:00Z	never

A token whose line is removed is revoked. Times are UTC.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from txnbuffer.access.policy import check_principal
from txnbuffer.errors import InvalidTokenFile

HEAD = "# txnbuffer tokens 1: id, principal, SHA-256 of the secret, created, expires"
NEVER = "never"
PREFIX = "txnb"
ID_BYTES, SECRET_BYTES = 6, 32
TIME = "%Y-%m-%dT%H:%M:%SZ"
_TOKEN = re.compile(f"{PREFIX}_([0-9a-f]{{{2 * ID_BYTES}}})_([0-9a-f]{{{2 * SECRET_BYTES}}})")
_ID, _HASH = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}"), re.compile("[0-9a-f]{64}")


class IssuedToken(NamedTuple):
    """What is stored of a token; times are seconds since 1970, `expires` is None for one that never does."""

    id: str
    principal: str
    hash: str
    created: int
    expires: int | None


class TokenFile(NamedTuple):
    """All tokens, by id."""

    tokens: dict[str, IssuedToken]

    def find(self, text: str) -> IssuedToken | None:
        """The token of this text, whether it has expired or not; None if there is none."""
        match = _TOKEN.fullmatch(text)
        known = None if match is None else self.tokens.get(match[1])
        if match is None or known is None or not hmac.compare_digest(known.hash, _hash(match[2])):
            return None
        return known

    def format(self) -> str:
        """The text of the file."""
        return "\n".join([HEAD, *map(_line, self.tokens.values()), ""])


def issue(principal: str, random: bytes, now: int, expires: int | None) -> tuple[str, IssuedToken]:
    """A new token: its text, and what is stored of it. `random`: ID_BYTES + SECRET_BYTES random bytes."""
    name, secret = random[:ID_BYTES].hex(), random[ID_BYTES:].hex()
    return f"{PREFIX}_{name}_{secret}", IssuedToken(name, check_principal(principal), _hash(secret), now, expires)


def is_issued(text: str) -> bool:
    """Whether a text has the form of a token of this file, rather than that of a JWT."""
    return text.startswith(f"{PREFIX}_")


def tokens_of(data: bytes, source: str) -> TokenFile:
    """The tokens in the bytes of a file. Raises InvalidTokenFile."""
    try:
        return parse_tokens(data.decode(), source)
    except UnicodeDecodeError:
        raise InvalidTokenFile(f"{source} is not a token file: create one with `txnbuf token create`") from None


def parse_tokens(text: str, source: str) -> TokenFile:
    """Parse a file of tokens; `source` names it in errors. Raises InvalidTokenFile."""
    lines = text.splitlines()
    if not lines or lines[0] != HEAD:
        raise InvalidTokenFile(f"{source} is not a token file: create one with `txnbuf token create`")
    tokens: dict[str, IssuedToken] = {}
    for number, line in enumerate(lines[1:], 2):
        token = _parse(line)
        if token is None or token.id in tokens:
            what = "is not a token" if token is None else f"has the id of another one, {token.id}"
            raise InvalidTokenFile(f"{source}: line {number} {what}: remove it")
        tokens[token.id] = token
    return TokenFile(tokens)


def _parse(line: str) -> IssuedToken | None:
    try:
        name, principal, hashed, created, expires = line.split("\t")
        check_principal(principal)
        ends = None if expires == NEVER else _seconds(expires)
        token = IssuedToken(name, principal, hashed, _seconds(created), ends)
    except ValueError:
        return None
    return token if _ID.fullmatch(name) and _HASH.fullmatch(hashed) else None


def _line(token: IssuedToken) -> str:
    expires = NEVER if token.expires is None else time_text(token.expires)
    return "\t".join([token.id, token.principal, token.hash, time_text(token.created), expires])


def time_text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(TIME)


def _seconds(text: str) -> int:
    return int(datetime.strptime(text, TIME).replace(tzinfo=UTC).timestamp())


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def with_token(file: TokenFile, token: IssuedToken) -> TokenFile:
    return TokenFile({**file.tokens, token.id: token})


def without_tokens(file: TokenFile, ids: Iterable[str]) -> TokenFile:
    removed = {*ids}
    return TokenFile({name: token for name, token in file.tokens.items() if name not in removed})
