"""Who a client is: the principal of its token or certificate

Without any credential in the configuration all clients are `anonymous`. A token wins over the certificate of the same
connection, which then only protects the transport.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from broker_io.environment import Clock
from broker_io.rpc.credential_files import ClientCertificate, CredentialFile, Watched
from txnbuffer.access.jwt import TokenBearer, Verifier
from txnbuffer.access.policy import check_principal
from txnbuffer.access.tokens import TokenFile, is_issued, tokens_of
from txnbuffer.config import AccessConfig
from txnbuffer.errors import Unauthenticated

ANONYMOUS = "anonymous"
BEARER = "Bearer "
MAX_VERIFIED = 10_000
"""Tokens whose verification is remembered."""


class Caller(NamedTuple):
    """Who makes a call. `token`: the id of an issued token.

    `expires`: when its token or certificate does, in seconds since 1970, or None.

    `keys`: the number of the version of the public keys that have verified a token of somebody else, or None.
    """

    principal: str
    token: str | None = None
    expires: int | None = None
    keys: int | None = None


NOBODY = Caller(ANONYMOUS)


def authenticates(config: AccessConfig) -> bool:
    """Whether clients must say who they are."""
    return bool(config.tokens or config.jwt_key or config.client_ca)


class Authenticator:
    """Raises InvalidConfiguration, and MissingDependency, for files that can't be used."""

    def __init__(self, config: AccessConfig, clock: Clock) -> None:
        self._clock = clock
        self.enabled = authenticates(config)
        self.takes_certificates = bool(config.client_ca)
        self._tokens: Watched[TokenFile] | None = None
        self._verifier: Watched[Verifier] | None = None
        self._verified: dict[bytes, TokenBearer] = {}
        self._keys = 0
        if config.tokens:
            self._tokens = CredentialFile(config.tokens, "access.tokens").watched(tokens_of, secret=True)
        if config.jwt_key:
            self._verifier = CredentialFile(config.jwt_key, "access.jwt_key").watched(
                lambda keys, path: Verifier(
                    keys, path, claim=config.jwt_claim, issuer=config.jwt_issuer, audience=config.jwt_audience
                ),
                secret=False,
            )

    @property
    def files(self) -> list[Watched[TokenFile] | Watched[Verifier]]:
        return [file for file in (self._tokens, self._verifier) if file is not None]

    def refresh(self) -> bool:
        """Read the files again that have changed; whether one has."""
        changed = [file.refresh() for file in self.files]
        if self._verifier is not None and changed[-1]:
            self._keys += 1
        if any(changed):
            self._verified.clear()
        return any(changed)

    def authenticate(self, authorization: str | None, certificate: ClientCertificate | None) -> Caller:
        """The caller, from the header `authorization` and a verified certificate. Raises Unauthenticated."""
        if not self.enabled:
            return NOBODY
        if certificate is not None and self._now() >= certificate.expires:
            raise Unauthenticated("the client certificate has expired: connect with a new one")
        if authorization is not None:
            if authorization[: len(BEARER)].lower() != BEARER.lower():
                raise Unauthenticated("the header 'authorization' is not 'Bearer TOKEN': send a token")
            return self._of_token(authorization[len(BEARER) :].strip())
        if certificate is not None and certificate.name is not None and self.takes_certificates:
            try:
                return Caller(check_principal(certificate.name), expires=certificate.expires)
            except ValueError as error:
                raise Unauthenticated(f"the certificate names no possible principal: {error}") from None
        ways = ["a token"] * bool(self.files) + ["a client certificate"] * self.takes_certificates
        raise Unauthenticated(f"this service must know who you are: connect with {' or '.join(ways)}")

    def check_valid(self, caller: Caller) -> None:
        """Raises Unauthenticated if the token of a connected caller has expired or was revoked."""
        if caller.token is not None and (self._tokens is None or caller.token not in self._tokens.value.tokens):
            raise Unauthenticated(f"token {caller.token} was revoked: get a new one")
        if caller.expires is not None and self._now() >= caller.expires:
            what = "token" if caller.token or caller.keys is not None else "client certificate"
            raise Unauthenticated(f"the {what} has expired: get a new one")
        if caller.keys not in (None, self._keys):
            raise Unauthenticated("the keys that verify tokens have changed: get a token signed with a current key")

    def _of_token(self, text: str) -> Caller:
        if self._tokens is not None and is_issued(text):
            token = self._tokens.value.find(text)
            if token is None:
                raise Unauthenticated("the token is unknown, or was revoked: get a new one")
            caller = Caller(token.principal, token.id, token.expires)
            self.check_valid(caller)
            return caller
        if self._verifier is None:
            raise Unauthenticated("this service has not issued the token: get one with `txnbuf token create`")
        digest = hashlib.sha256(text.encode(errors="replace")).digest()
        bearer = self._verified.get(digest)
        if bearer is None or (bearer.expires is not None and self._now() >= bearer.expires):
            bearer = self._verifier.value.verify(text, self._now())
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.clear()
            self._verified[digest] = bearer
        return Caller(bearer.principal, None, bearer.expires, self._keys)

    def _now(self) -> int:
        return self._clock.now_ms() // 1000
