"""JSON Web Tokens that somebody else has signed, such as those of a Pulsar cluster: who their bearer is

The keys are public: a PEM file with one or several keys, a DER file as Pulsar uses it, or a JWKS file. A token names
none of its own: the algorithms that are accepted follow from the kind of the key, so neither `none` nor an HMAC with a
public key is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from broker_io.errors import MissingDependency
from txnbuffer.access.policy import check_principal
from txnbuffer.errors import InvalidConfiguration, Unauthenticated

ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA", "Ed25519", "Ed448"),
}
"""The algorithms of each kind of public key."""
LEEWAY = 10
"""Seconds by which clocks may differ."""
MAX_BYTES = 16 * 1024
_PEM = re.compile(rb"-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----", re.DOTALL)


class TokenBearer(NamedTuple):
    """`expires`: seconds since 1970 when it is no longer accepted, or None."""

    principal: str
    expires: int | None


class Verifier:
    """Verifies tokens with the keys of a file, which `source` names in errors. Raises InvalidConfiguration."""

    def __init__(self, keys: bytes, source: str, *, claim: str = "sub", issuer: str = "", audience: str = "") -> None:
        self._keys = _key_set(keys, source)
        self._algorithms = sorted({name for key in self._keys.keys for name in ALGORITHMS[key.key_type]})
        self._claim = claim
        self._issuer = issuer
        self._audience = audience

    def verify(self, text: str, now: int) -> TokenBearer:
        """The bearer of a token. Raises Unauthenticated, which says what is wrong with it but not what it contains."""
        if len(text) > MAX_BYTES:
            raise Unauthenticated(f"the token has over {MAX_BYTES} bytes: give one that is shorter")
        claims = self._claims(text)
        expires = _time(claims, "exp")
        if expires is not None and now >= expires + LEEWAY:
            raise Unauthenticated("the token has expired: get a new one")
        not_before = _time(claims, "nbf")
        if not_before is not None and now < not_before - LEEWAY:
            raise Unauthenticated("the token is not valid yet: check the clocks")
        if self._issuer and claims.get("iss") != self._issuer:
            raise Unauthenticated("the token is of another issuer: get one of the issuer that this service trusts")
        audience = claims.get("aud")
        if self._audience and self._audience not in (audience if isinstance(audience, list) else [audience]):
            raise Unauthenticated("the token is for another audience: get one for this service")
        name = claims.get(self._claim)
        if not isinstance(name, str):
            raise Unauthenticated(f"the token has no claim {self._claim!r} that names its bearer")
        try:
            return TokenBearer(check_principal(name), None if expires is None else expires + LEEWAY)
        except ValueError as error:
            raise Unauthenticated(f"the token names no possible principal: {error}") from None

    def _claims(self, text: str) -> Mapping[str, Any]:
        from joserfc import jwt
        from joserfc.errors import JoseError

        for key in self._keys.keys:
            try:
                claims = jwt.decode(text, key, algorithms=list(ALGORITHMS[key.key_type])).claims
            except (JoseError, ValueError, TypeError, KeyError, RecursionError):
                continue
            if isinstance(claims, dict):
                return claims
        raise Unauthenticated(
            f"the token is not signed by a key that this service trusts ({', '.join(self._algorithms)}): get one "
            "that is"
        )


def _time(claims: Mapping[str, Any], name: str) -> int | None:
    found = claims.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < 2**53:
        raise Unauthenticated(f"the claim {name!r} of the token is not a time: get a new token")
    return int(found)


def _key_set(data: bytes, source: str) -> Any:
    """All public keys of a file. Raises InvalidConfiguration, and MissingDependency."""
    try:
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet
    except ImportError as error:
        raise MissingDependency(
            "tokens that somebody else has signed need another package: pip install 'txnbuffer[jwt]'"
        ) from error
    if b"PRIVATE KEY-" in data:
        raise InvalidConfiguration(f"{source} has a private key: give only public keys, of RSA, EC or Ed25519")
    try:
        if data.lstrip()[:1] == b"{":
            keys = KeySet.import_key_set(json.loads(data))
        else:
            keys = KeySet([_key(pem) for pem in _PEM.findall(data)] or [_key(data)])
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise InvalidConfiguration(f"{source} has no public keys in PEM, DER or JWKS: {error}") from None
    for key in keys.keys:
        if key.key_type not in ALGORITHMS or key.is_private:
            what = "a private key" if key.key_type in ALGORITHMS else f"a key of the kind {key.key_type!r}"
            raise InvalidConfiguration(f"{source} has {what}: give only public keys, of RSA, EC or Ed25519")
    return keys


def _key(data: bytes) -> Any:
    """One public key, in PEM or DER."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from joserfc.jwk import ECKey, OKPKey, RSAKey

    is_pem = data.startswith(b"-----BEGIN")
    key = (serialization.load_pem_public_key if is_pem else serialization.load_der_public_key)(data)
    kind: Any = OKPKey
    if isinstance(key, rsa.RSAPublicKey):
        kind = RSAKey
    elif isinstance(key, ec.EllipticCurvePublicKey):
        kind = ECKey
    text = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return kind.import_key(text)
